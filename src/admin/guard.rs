//! Who may use which of the operators' pages: holders of a token or of a client certificate, by its role, and no page of
//! a website that an operator's browser shows. Pure.

use std::fmt;

use hyper::header::{AUTHORIZATION, HOST, HeaderName, ORIGIN};
use hyper::{HeaderMap, StatusCode, Uri};
use sha2::{Digest, Sha256};

use super::role::Role;
use super::settings::Settings;
use crate::http::tls::ClientNames;

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// A token that has the role is missing or wrong.
    Unauthenticated {
        needs: Role,
        sent: bool,
        /// Whether certificates have roles, too.
        has_names: bool,
    },
    /// Neither the token nor the client certificate has a role that is enough. `has`: the role that one of them has.
    Forbidden { needs: Role, has: Option<Role> },
    /// Another site's page sent it.
    CrossSite,
    /// `Host` is a name that is not this host's, as after DNS rebinding.
    ForeignHost,
}

impl Refusal {
    pub(super) fn status(self) -> StatusCode {
        match self {
            Self::Unauthenticated { .. } => StatusCode::UNAUTHORIZED,
            Self::Forbidden { .. } | Self::CrossSite => StatusCode::FORBIDDEN,
            Self::ForeignHost => StatusCode::MISDIRECTED_REQUEST,
        }
    }

    /// The value of a metric's label.
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Unauthenticated { .. } => "unauthenticated",
            Self::Forbidden { .. } => "forbidden",
            Self::CrossSite => "cross_site",
            Self::ForeignHost => "foreign_host",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unauthenticated {
                needs,
                sent,
                has_names,
            } => {
                let unknown = if *sent { ", and the token is unknown" } else { "" };
                write!(
                    f,
                    "this page needs the role `{needs}`{unknown}: send a token of {} as `Authorization: Bearer TOKEN`",
                    needs.token_settings()
                )?;
                if *has_names {
                    write!(
                        f,
                        ", or use a client certificate with a name of {}",
                        needs.name_settings()
                    )
                } else {
                    Ok(())
                }
            }
            Self::Forbidden {
                needs,
                has: Some(has),
            } => write!(
                f,
                "this page needs the role `{needs}`, and yours is `{has}`: use a token of {}, or a client certificate with a \
                 name of {}",
                needs.token_settings(),
                needs.name_settings()
            ),
            Self::Forbidden { needs, has: None } => write!(
                f,
                "this page needs the role `{needs}`: use a client certificate with a name of {}",
                needs.name_settings()
            ),
            Self::CrossSite => f.write_str("pages of other sites may not use this one"),
            Self::ForeignHost => f.write_str(
                "without `admin.token`, `admin.tokens` or `admin.client_names`, call this listener by its address or as \
                 `localhost`",
            ),
        }
    }
}

/// Checks requests before their pages do.
#[derive(Debug)]
pub(super) struct Guard {
    /// Digests of the tokens: comparing digests takes a time that reveals nothing about a token.
    tokens: Vec<([u8; 32], Role)>,
    names: Vec<(String, Role)>,
}

impl Guard {
    pub(super) fn new(settings: &Settings) -> Self {
        let tokens = settings.tokens();
        let digests = tokens.map(|(_, role, token)| (digest(token.expose().as_bytes()), role));
        Self {
            tokens: digests.collect(),
            names: settings
                .client_names()
                .map(|(_, role, name)| (name.to_owned(), role))
                .collect(),
        }
    }

    /// Checks a request for a page that needs a role. `is_safe`: its method changes nothing. `names`: those of the
    /// client's verified certificate.
    pub(super) fn check(
        &self,
        needs: Option<Role>,
        is_safe: bool,
        uri: &Uri,
        headers: &HeaderMap,
        names: Option<&ClientNames>,
    ) -> Result<(), Refusal> {
        let host = uri.authority().map(|authority| authority.as_str());
        let host = host.or_else(|| headers.get(HOST)?.to_str().ok());
        if !is_safe && is_cross_site(headers, host) {
            return Err(Refusal::CrossSite);
        }
        let Some(needs) = needs else {
            return Ok(());
        };
        if self.tokens.is_empty() && self.names.is_empty() {
            // A page whose name was made to resolve to this host sends the name.
            return if host.is_some_and(|host| !is_local_name(host)) {
                Err(Refusal::ForeignHost)
            } else {
                Ok(())
            };
        }
        let sent = bearer(headers);
        let of_token = sent.and_then(|token| self.role_of(token));
        let of_names = names.and_then(|names| self.role_of_names(names));
        match of_token.max(of_names) {
            Some(has) if has >= needs => Ok(()),
            None if !self.tokens.is_empty() => Err(Refusal::Unauthenticated {
                needs,
                sent: sent.is_some(),
                has_names: !self.names.is_empty(),
            }),
            // Without tokens there is nothing that a client could send besides its certificate.
            has => Err(Refusal::Forbidden { needs, has }),
        }
    }

    fn role_of_names(&self, names: &ClientNames) -> Option<Role> {
        let of_names = self.names.iter().filter(|(name, _)| names.has(name));
        of_names.map(|(_, role)| *role).max()
    }

    fn role_of(&self, token: &[u8]) -> Option<Role> {
        let sent = digest(token);
        let of_token = self.tokens.iter().filter(|(digest, _)| *digest == sent);
        of_token.map(|(_, role)| *role).max()
    }
}

fn digest(token: &[u8]) -> [u8; 32] {
    Sha256::digest(token).into()
}

/// True if a browser sent it for a page of another site.
fn is_cross_site(headers: &HeaderMap, host: Option<&str>) -> bool {
    let site = headers.get(FETCH_SITE).map(|site| site.as_bytes());
    if site.is_some_and(|site| site != b"same-origin" && site != b"none") {
        return true;
    }
    let origin = headers.get(ORIGIN).map(|origin| origin.to_str());
    origin.is_some_and(|origin| {
        let origin = origin.ok().and_then(|origin| origin.split_once("://"));
        origin.map(|(_, origin_host)| origin_host) != host
    })
}

/// True for an address and for `localhost`, with or without a port.
fn is_local_name(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || address.parse::<std::net::IpAddr>().is_ok()
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked(b"Bearer ".len())?;
    let is_bearer = scheme.eq_ignore_ascii_case(b"Bearer ");
    is_bearer.then(|| token.trim_ascii())
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::super::pages::PAGES;
    use super::super::settings::{NamesByRole, Tokens};
    use super::*;
    use crate::secret::Secret;

    const READER: &str = "reader-0123456789";
    const OPERATOR: &str = "operator-0123456789";
    const NEW_OPERATOR: &str = "new-operator-0123456789";

    /// Two tokens of operators, as while one is replaced.
    fn with_roles() -> Guard {
        Guard::new(&Settings {
            token: Secret::new(OPERATOR),
            tokens: Tokens {
                read: vec![Secret::new(READER)],
                operate: vec![Secret::new(NEW_OPERATOR)],
            },
            ..Settings::default()
        })
    }

    fn open() -> Guard {
        Guard::new(&Settings::default())
    }

    fn map(headers: &[(&'static str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, HeaderValue::from_str(value).unwrap());
        }
        map
    }

    /// The answer of one page to one request.
    fn ask(
        guard: &Guard,
        path: &'static str,
        headers: &[(&'static str, &str)],
    ) -> Result<(), Refusal> {
        let page = PAGES.iter().find(|page| page.path == path).unwrap();
        let is_safe = page.method.is_safe();
        guard.check(
            page.needs,
            is_safe,
            &Uri::from_static(path),
            &map(headers),
            None,
        )
    }

    /// The status of every page for a token of every role; the table goes over all pages that there are.
    #[test]
    fn each_role_reaches_its_pages_and_no_other() {
        let guard = with_roles();
        for page in &PAGES {
            let expected = match page.needs {
                None => [200, 200, 200, 200, 200],
                Some(Role::Read) => [401, 401, 200, 200, 200],
                Some(Role::Operate) => [401, 401, 403, 200, 200],
            };
            let unknown = "unknown-0123456789";
            let tokens = [
                None,
                Some(unknown),
                Some(READER),
                Some(OPERATOR),
                Some(NEW_OPERATOR),
            ];
            let found = tokens.map(|token| {
                let header = token.map(|token| format!("Bearer {token}"));
                // With a token the name by which the listener is called does not matter.
                let mut headers = vec![("host", "router.llm.svc:9090")];
                headers.extend(header.as_deref().map(|header| ("authorization", header)));
                let answer = ask(&guard, page.path, &headers);
                answer.map_or_else(|refusal| refusal.status().as_u16(), |()| 200)
            });
            assert_eq!(found, expected, "{}", page.path);
        }
    }

    #[test]
    fn a_refusal_names_the_role_and_the_setting() {
        let guard = with_roles();
        let message = |path, token: &str| {
            let header = format!("Bearer {token}");
            ask(&guard, path, &[("authorization", &header)])
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            message("/drain", READER),
            "this page needs the role `operate`, and yours is `read`: use a token of `admin.tokens.operate` or \
             `admin.token`, or a client certificate with a name of `admin.client_names.operate`"
        );
        assert_eq!(
            message("/fleet", "wrong"),
            "this page needs the role `read`, and the token is unknown: send a token of `admin.tokens.read`, \
             `admin.tokens.operate` or `admin.token` as `Authorization: Bearer TOKEN`"
        );
        assert_eq!(
            ask(&guard, "/drain", &[]).unwrap_err().to_string(),
            "this page needs the role `operate`: send a token of `admin.tokens.operate` or `admin.token` as \
             `Authorization: Bearer TOKEN`"
        );
    }

    /// The status of each page for clients with these names in their certificates.
    fn check_names(tokens: Tokens, names: &[&str], token: Option<&str>, read: u16, operate: u16) {
        let guard = Guard::new(&Settings {
            tokens,
            client_names: NamesByRole {
                read: vec!["dashboard.example.com".to_owned()],
                operate: vec!["spiffe://example.com/operator".to_owned()],
            },
            ..Settings::default()
        });
        let names = ClientNames::new(names.iter().copied());
        let header = token.map(|token| format!("Bearer {token}"));
        let headers: Vec<_> = header
            .iter()
            .map(|header| ("authorization", header.as_str()))
            .collect();
        for page in &PAGES {
            let expected = match page.needs {
                None => 200,
                Some(Role::Read) => read,
                Some(Role::Operate) => operate,
            };
            let (uri, headers) = (Uri::from_static(page.path), map(&headers));
            let answer = guard.check(
                page.needs,
                page.method.is_safe(),
                &uri,
                &headers,
                Some(&names),
            );
            if let Err(refusal) = answer {
                let message = refusal.to_string();
                assert!(
                    message.contains("`admin.client_names.operate`"),
                    "{message}"
                );
            }
            let found = answer.map_or_else(|refusal| refusal.status().as_u16(), |()| 200);
            assert_eq!(found, expected, "{} {names:?} {token:?}", page.path);
        }
    }

    #[test]
    fn a_client_certificate_has_the_role_of_its_names() {
        let (none, some) = (Tokens::default, || Tokens {
            read: vec![Secret::new(READER)],
            operate: vec![Secret::new(OPERATOR)],
        });
        let (dashboard, operator) = ("dashboard.example.com", "spiffe://example.com/operator");
        check_names(none(), &[dashboard], None, 200, 403);
        check_names(none(), &[operator], None, 200, 200);
        check_names(none(), &[dashboard, operator], None, 200, 200);
        // No token could help.
        check_names(none(), &["other.example.com"], None, 403, 403);
        check_names(none(), &[], None, 403, 403);
        check_names(none(), &[], Some(OPERATOR), 403, 403);
        // A token could.
        check_names(some(), &["other.example.com"], None, 401, 401);
        check_names(some(), &["other.example.com"], Some(READER), 200, 403);
        check_names(some(), &[dashboard], Some(OPERATOR), 200, 200);
        check_names(some(), &[dashboard], Some("unknown-0123456789"), 200, 403);
    }

    #[test]
    fn a_token_is_sent_as_a_bearer_token() {
        let guard = with_roles();
        for (value, is_right) in [
            (format!("bearer {OPERATOR}"), true),
            (format!("Bearer  {OPERATOR} "), true),
            (format!("Basic {OPERATOR}"), false),
            (OPERATOR.to_owned(), false),
            (format!("Bearer {OPERATOR}x"), false),
            ("Bearer ".to_owned(), false),
        ] {
            let answer = ask(&guard, "/drain", &[("authorization", &value)]);
            assert_eq!(answer.is_ok(), is_right, "{value}");
        }
    }

    #[test]
    fn with_tokens_of_readers_alone_no_request_changes_anything() {
        let guard = Guard::new(&Settings {
            tokens: Tokens {
                read: vec![Secret::new(READER)],
                operate: Vec::new(),
            },
            ..Settings::default()
        });
        let reader = format!("Bearer {READER}");
        for page in PAGES
            .iter()
            .filter(|page| page.needs == Some(Role::Operate))
        {
            assert!(ask(&guard, page.path, &[("authorization", &reader)]).is_err());
            assert!(ask(&guard, page.path, &[]).is_err());
        }
    }

    #[test]
    fn a_page_of_another_site_changes_nothing() {
        for headers in [
            &[("origin", "https://example.com")][..],
            &[("origin", "null")],
            &[("sec-fetch-site", "cross-site")],
            &[("sec-fetch-site", "same-site")],
            &[("origin", "http://127.0.0.1:8000")],
        ] {
            let mut all = vec![("host", "127.0.0.1:9090")];
            all.extend(headers);
            for page in PAGES.iter().filter(|page| !page.method.is_safe()) {
                assert_eq!(ask(&open(), page.path, &all), Err(Refusal::CrossSite));
            }
        }
        for headers in [
            &[("host", "127.0.0.1:9090")][..],
            &[
                ("host", "127.0.0.1:9090"),
                ("origin", "http://127.0.0.1:9090"),
            ],
            &[("host", "[::1]:9090"), ("sec-fetch-site", "same-origin")],
            &[("host", "localhost:9090"), ("sec-fetch-site", "none")],
            &[],
        ] {
            assert_eq!(ask(&open(), "/drain", headers), Ok(()), "{headers:?}");
        }
    }

    #[test]
    fn without_a_token_only_this_hosts_own_names_are_answered() {
        for page in &PAGES {
            let rebound = ask(&open(), page.path, &[("host", "evil.example:9090")]);
            match page.needs {
                None => assert_eq!(rebound, Ok(()), "{}", page.path),
                Some(_) => assert_eq!(rebound, Err(Refusal::ForeignHost), "{}", page.path),
            }
        }
        for host in ["LOCALHOST", "[::1]", "10.0.0.7:9090"] {
            assert_eq!(ask(&open(), "/kv", &[("host", host)]), Ok(()), "{host}");
        }
    }
}
