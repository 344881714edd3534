//! Who may use the operators' pages: holders of the token, and no page of a website that an operator's browser shows.
//! Pure.

use hyper::header::{AUTHORIZATION, HOST, HeaderName, ORIGIN};
use hyper::{HeaderMap, Method, StatusCode, Uri};
use sha2::{Digest, Sha256};

use crate::secret::Secret;

/// Pages for kubelets, load balancers and Prometheus. They change nothing and show no prompt.
const OPEN: [&str; 4] = ["/", "/healthz", "/readyz", "/metrics"];

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The token is missing or wrong.
    Token,
    /// Another site's page sent it.
    CrossSite,
    /// `Host` is a name that is not this host's, as after DNS rebinding.
    ForeignHost,
}

impl Refusal {
    pub(super) fn status(self) -> StatusCode {
        match self {
            Self::Token => StatusCode::UNAUTHORIZED,
            Self::CrossSite => StatusCode::FORBIDDEN,
            Self::ForeignHost => StatusCode::MISDIRECTED_REQUEST,
        }
    }

    pub(super) fn message(self) -> &'static str {
        match self {
            Self::Token => "send the token of `admin.token` as `Authorization: Bearer TOKEN`",
            Self::CrossSite => "pages of other sites may not use this one",
            Self::ForeignHost => {
                "without `admin.token`, call this listener by its address or as `localhost`"
            }
        }
    }
}

/// Checks requests before their pages do.
#[derive(Debug)]
pub(super) struct Guard {
    /// The digest of the token: comparing digests takes a time that reveals nothing about the token.
    token: Option<[u8; 32]>,
}

impl Guard {
    /// An empty token: none.
    pub(super) fn new(token: &Secret) -> Self {
        let digest = || Sha256::digest(token.expose()).into();
        Self {
            token: (!token.is_empty()).then(digest),
        }
    }

    pub(super) fn check(
        &self,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<(), Refusal> {
        let is_read = matches!(*method, Method::GET | Method::HEAD);
        let host = uri.authority().map(|it| it.as_str());
        let host = host.or_else(|| headers.get(HOST)?.to_str().ok());
        if !is_read && is_cross_site(headers, host) {
            return Err(Refusal::CrossSite);
        }
        if is_read && OPEN.contains(&uri.path()) {
            return Ok(());
        }
        match &self.token {
            Some(token) => match bearer(headers) {
                Some(given) if <[u8; 32]>::from(Sha256::digest(given)) == *token => Ok(()),
                _ => Err(Refusal::Token),
            },
            // A page whose name was made to resolve to this host sends the name.
            None if host.is_some_and(|host| !is_local_name(host)) => Err(Refusal::ForeignHost),
            None => Ok(()),
        }
    }
}

/// True if a browser sent it for a page of another site.
fn is_cross_site(headers: &HeaderMap, host: Option<&str>) -> bool {
    let site = headers.get(FETCH_SITE).map(|site| site.as_bytes());
    if site.is_some_and(|site| site != b"same-origin" && site != b"none") {
        return true;
    }
    let origin = headers.get(ORIGIN).map(|origin| origin.to_str());
    origin.is_some_and(|origin| {
        let origin = origin.ok().and_then(|it| it.split_once("://"));
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

    use super::*;

    const TOKEN: &str = "0123456789abcdef";

    fn check(
        token: &str,
        method: &Method,
        path: &'static str,
        headers: &[(&'static str, &'static str)],
        expected: Result<(), Refusal>,
    ) {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, HeaderValue::from_static(value));
        }
        let guard = Guard::new(&Secret::new(token));
        let found = guard.check(method, &Uri::from_static(path), &map);
        assert_eq!(found, expected, "{method} {path} {headers:?}");
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
            for path in ["/drain", "/undrain", "/explain"] {
                check("", &Method::POST, path, &all, Err(Refusal::CrossSite));
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
            check("", &Method::POST, "/drain", headers, Ok(()));
        }
    }

    #[test]
    fn without_a_token_only_this_hosts_own_names_are_answered() {
        let rebound = &[("host", "evil.example:9090")];
        for path in ["/kv", "/fleet", "/drain"] {
            check("", &Method::GET, path, rebound, Err(Refusal::ForeignHost));
        }
        check("", &Method::GET, "/metrics", rebound, Ok(()));
        check("", &Method::GET, "/kv", &[("host", "LOCALHOST")], Ok(()));
        check("", &Method::GET, "/kv", &[("host", "[::1]")], Ok(()));
    }

    #[test]
    fn with_a_token_only_probes_and_metrics_are_open() {
        for path in ["/", "/healthz", "/readyz", "/metrics"] {
            check(TOKEN, &Method::GET, path, &[], Ok(()));
        }
        for path in ["/fleet", "/kv", "/kv/blocks", "/responses"] {
            check(TOKEN, &Method::GET, path, &[], Err(Refusal::Token));
        }
        let wrong = &[("authorization", "Bearer 0123456789abcdeg")];
        check(TOKEN, &Method::POST, "/drain", wrong, Err(Refusal::Token));
        let basic = &[("authorization", "Basic 0123456789abcdef")];
        check(TOKEN, &Method::POST, "/drain", basic, Err(Refusal::Token));
        let right = &[
            ("authorization", "bearer 0123456789abcdef"),
            ("host", "router.llm.svc:9090"),
        ];
        check(TOKEN, &Method::POST, "/drain", right, Ok(()));
        check(TOKEN, &Method::GET, "/kv", right, Ok(()));
    }
}
