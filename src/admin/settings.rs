//! The `admin` settings: the operators' listener, and who may do what there.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::role::Role;
use crate::http::tls;
use crate::secret::Secret;

/// A token of 16 random characters cannot be guessed over a network.
const TOKEN_BYTES_MIN: usize = 16;
/// More open pages would leave no connection of the listener to other operators.
const MAX_VIEWERS: u32 = 48;

/// The listener for operators.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Address and port for operators. Only this host by default, since its pages drain workers and show how
    /// prompts are routed. Any other address needs `token`, `tokens` or `client_names`.
    pub listen: String,
    /// TLS. Left out: connections are not encrypted.
    pub tls: Option<tls::ServerSettings>,
    /// The short form of one token in `tokens.operate`: what operators send as `authorization: Bearer ...`. Text,
    /// `${NAME}` or `file:/path`, at least 16 characters. With any token or name all pages but `/`, `/pages`,
    /// `/healthz`, `/readyz` and `/metrics` need one. Empty: none.
    pub token: Secret,
    /// Tokens by the role of those who send them. Several of a role work at the same time, so that one can be replaced.
    pub tokens: Tokens,
    /// Names in the client certificates of operators, by role. Needs `tls.client_ca`.
    pub client_names: NamesByRole,
    /// The dashboard at `/`.
    pub dashboard: Dashboard,
}

/// Tokens of operators, by role.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Tokens {
    /// For dashboards and people on call: every page that shows the router's state. Each as `token`.
    pub read: Vec<Secret>,
    /// Everything: also what changes something (such as `/drain`), and `/explain` and `/kv/blocks`, which show
    /// something of prompts. Each as `token`.
    pub operate: Vec<Secret>,
}

/// Names in the client certificates of operators, by role.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct NamesByRole {
    /// As `tokens.read`: subject alternative names, as in `tls.client_names`.
    pub read: Vec<String>,
    /// As `tokens.operate`.
    pub operate: Vec<String>,
}

/// The dashboard, the page at `/` of the operators' listener.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Dashboard {
    /// Open dashboards that get updates, at most 48; further ones are refused. 0 turns the dashboard off.
    pub max_viewers: u32,
}

impl Default for Dashboard {
    fn default() -> Self {
        Self {
            // A team, each with a page or two.
            max_viewers: 16,
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:9090".to_owned(),
            tls: None,
            token: Secret::default(),
            tokens: Tokens::default(),
            client_names: NamesByRole::default(),
            dashboard: Dashboard::default(),
        }
    }
}

impl Settings {
    /// Whether any page asks who sends the request.
    pub fn has_credentials(&self) -> bool {
        self.tokens().next().is_some() || self.client_names().next().is_some()
    }

    /// What is wrong: the key below `admin`, and a message without any token.
    pub fn check(&self) -> Vec<(String, String)> {
        let mut problems = Vec::new();
        if self.dashboard.max_viewers > MAX_VIEWERS {
            let message = format!("must be at most {MAX_VIEWERS}");
            problems.push(("dashboard.max_viewers".to_owned(), message));
        }
        let mut seen = BTreeMap::new();
        for (key, _, token) in self.tokens() {
            let text = token.expose();
            if text.len() < TOKEN_BYTES_MIN {
                let message = format!("must have at least {TOKEN_BYTES_MIN} characters");
                problems.push((key, message));
            } else if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
                let message = "has characters that no bearer token can have".to_owned();
                problems.push((key, message));
            } else if let Some(first) = seen.get(text) {
                problems.push((key, format!("is `admin.{first}` already")));
            } else {
                seen.insert(text, key);
            }
        }
        let tls = self.tls.as_ref().filter(|tls| !tls.client_ca.is_empty());
        for (key, _, name) in self.client_names() {
            let Some(tls) = tls else {
                let message =
                    "needs `admin.tls.client_ca`: without it no client's certificate is verified";
                problems.push((key, message.to_owned()));
                continue;
            };
            let allowed = &tls.client_names;
            if !allowed.is_empty() && !tls::ClientNames::new([name.as_str()]).are_allowed(allowed) {
                let message = format!(
                    "`{name}` is not in `admin.tls.client_names`, so no client that has it alone connects"
                );
                problems.push((key, message));
            }
        }
        problems
    }

    /// Each name of operators' certificates with its key below `admin` and its role.
    pub(super) fn client_names(&self) -> impl Iterator<Item = (String, Role, &String)> {
        let names = &self.client_names;
        by_role("client_names", &names.read, &names.operate)
    }

    /// Each token with its key below `admin` and the role of those who send it.
    pub(super) fn tokens(&self) -> impl Iterator<Item = (String, Role, &Secret)> {
        let short = Some(&self.token).filter(|token| !token.is_empty());
        let short = short.map(|token| ("token".to_owned(), Role::Operate, token));
        let listed = by_role("tokens", &self.tokens.read, &self.tokens.operate);
        short.into_iter().chain(listed)
    }
}

/// The entries of a setting's two lists, each with its key and its role.
fn by_role<'s, T>(
    setting: &'static str,
    read: &'s [T],
    operate: &'s [T],
) -> impl Iterator<Item = (String, Role, &'s T)> {
    let lists = [(Role::Read, read), (Role::Operate, operate)].into_iter();
    lists.flat_map(move |(role, entries)| {
        let entries = entries.iter().enumerate();
        entries.map(move |(index, entry)| (format!("{setting}.{role}[{index}]"), role, entry))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(token: &str, read: &[&str], operate: &[&str], expected: &[(&str, &str)]) {
        let secrets = |texts: &[&str]| texts.iter().map(|text| Secret::new(*text)).collect();
        let settings = Settings {
            token: Secret::new(token),
            tokens: Tokens {
                read: secrets(read),
                operate: secrets(operate),
            },
            ..Settings::default()
        };
        let found = settings.check();
        let found: Vec<(&str, &str)> = found.iter().map(|(key, text)| (&**key, &**text)).collect();
        assert_eq!(found, expected, "{read:?} {operate:?}");
    }

    #[test]
    fn more_viewers_than_the_listener_has_room_for_are_refused() {
        let check = |max_viewers| {
            let dashboard = Dashboard { max_viewers };
            let settings = Settings {
                dashboard,
                ..Settings::default()
            };
            settings.check()
        };
        assert!(check(Dashboard::default().max_viewers).is_empty());
        assert!(check(48).is_empty());
        let message = "must be at most 48".to_owned();
        assert_eq!(check(49), [("dashboard.max_viewers".to_owned(), message)]);
    }

    #[test]
    fn names_of_certificates_need_a_ca_and_must_be_let_in() {
        let settings = |client_ca: &str, allowed: &[&str]| Settings {
            tls: Some(tls::ServerSettings {
                client_ca: client_ca.to_owned(),
                client_names: allowed.iter().map(|name| (*name).to_owned()).collect(),
                ..tls::ServerSettings::default()
            }),
            client_names: NamesByRole {
                read: vec!["dashboard.example.com".to_owned()],
                operate: vec!["spiffe://example.com/operator".to_owned()],
            },
            ..Settings::default()
        };
        let keys = |settings: Settings| -> Vec<String> {
            settings.check().into_iter().map(|(key, _)| key).collect()
        };
        let (read, operate) = ("client_names.read[0]", "client_names.operate[0]");
        assert_eq!(keys(settings("", &[])), [read, operate]);
        assert_eq!(keys(settings("ca.pem", &[])), [""; 0]);
        assert_eq!(
            keys(settings("ca.pem", &["Dashboard.example.com"])),
            [operate]
        );
        assert!(settings("ca.pem", &[]).has_credentials());
    }

    #[test]
    fn a_token_is_long_printable_and_of_one_role() {
        let (first, second) = ("first-0123456789", "second-0123456789");
        check("", &[], &[], &[]);
        check(first, &[second], &[], &[]);
        let short = "must have at least 16 characters";
        check(
            "",
            &["short"],
            &[""],
            &[("tokens.read[0]", short), ("tokens.operate[0]", short)],
        );
        check("short", &[], &[], &[("token", short)]);
        let blank = [(
            "tokens.read[1]",
            "has characters that no bearer token can have",
        )];
        check("", &[first, "a blank in between"], &[], &blank);
        let twice = [("tokens.operate[1]", "is `admin.tokens.read[0]` already")];
        check("", &[first], &[second, first], &twice);
        let short_form = [("tokens.operate[0]", "is `admin.token` already")];
        check(first, &[], &[first], &short_form);
    }
}
