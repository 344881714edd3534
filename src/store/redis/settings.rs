//! How Redis is reached.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use crate::secret::Secret;
use crate::units::DurationText;

/// Redis 6.2 or later, with `maxmemory-policy` noeviction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// `redis://host:port`, or `rediss://host:port` for TLS: the server, the sentinels, or some nodes of the
    /// cluster.
    pub urls: Vec<String>,
    /// How `urls` are used.
    pub mode: Mode,
    /// The name of the master, for `mode: sentinel`.
    pub master: String,
    /// The user of Redis; empty for the default user.
    pub username: String,
    /// The password of Redis: text, `${NAME}` or `file:/path`.
    pub password: Secret,
    /// The user of the sentinels.
    pub sentinel_username: String,
    /// The password of the sentinels.
    pub sentinel_password: Secret,
    /// The number of the database. A cluster has only 0.
    pub database: u32,
    /// The prefix of all keys. Fleets that share a Redis need one each.
    pub prefix: String,
    /// TLS, for `rediss://`.
    pub tls: Tls,
    /// A failover loses writes that replicas of Redis did not have. Writes that clients rely on (new responses, ends,
    /// cancels, deletions, items of conversations) can wait for replicas (`WAIT`). One that too few have in time stands
    /// all the same, and is counted and logged.
    pub wait: Wait,
    /// Settings for experts.
    pub advanced: Advanced,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            urls: Vec::new(),
            mode: Mode::Standalone,
            master: String::new(),
            username: String::new(),
            password: Secret::default(),
            sentinel_username: String::new(),
            sentinel_password: Secret::default(),
            database: 0,
            prefix: "wr:".to_owned(),
            tls: Tls::default(),
            wait: Wait::default(),
            advanced: Advanced::default(),
        }
    }
}

/// The forms in which Redis is written: a URL, or its settings.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum UrlOrMap {
    Url(String),
    Map(Box<Settings>),
}

/// Reads Redis from any of its forms.
pub fn url_or_map<'de, D>(deserializer: D) -> Result<Option<Settings>, D::Error>
where
    D: Deserializer<'de>,
{
    let form = Option::<UrlOrMap>::deserialize(deserializer)?;
    Ok(form.map(|form| match form {
        UrlOrMap::Url(url) => Settings {
            urls: vec![url],
            ..Settings::default()
        },
        UrlOrMap::Map(settings) => *settings,
    }))
}

/// What the URLs of Redis are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// One server.
    Standalone,
    /// Sentinels, which know the master.
    Sentinel,
    /// Some nodes of a cluster.
    Cluster,
}

/// TLS for `rediss://`, files in PEM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Tls {
    /// Who may have signed the server's certificate. Empty: the system's list.
    pub ca_file: String,
    /// The client certificate, if the server asks for one.
    pub certificate_file: String,
    /// The key of the client certificate.
    pub key_file: String,
}

/// Writes that wait for replicas of Redis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Wait {
    /// Replicas that must have a write; 0 does not wait. More than there are makes all writes time out, which takes 100 ms;
    /// then writes do not wait for a second.
    pub replicas: u32,
    /// How long a write waits for them.
    #[serde(skip)]
    pub timeout: Duration,
}

impl Default for Wait {
    fn default() -> Self {
        Self {
            // A write would take a round trip more, and a Redis without replicas has none to wait for.
            replicas: 0,
            // A hundred times what replicas in the same zone take.
            timeout: Duration::from_millis(100),
        }
    }
}

/// Settings of Redis for experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Advanced {
    /// For a connection with all its handshakes. Within a zone it takes a millisecond, with TLS ten.
    #[serde(skip)]
    pub connect_timeout: Duration,
    /// For one read, and one second more for each 12.5 MB of it.
    #[schemars(extend("max" = "1h"))]
    #[serde(with = "DurationText")]
    pub read_timeout: Duration,
    /// For one write, and one second more for each 12.5 MB of it. Longer than for a read: after a write's time-out
    /// its outcome is unknown.
    #[schemars(extend("max" = "1h"))]
    #[serde(with = "DurationText")]
    pub write_timeout: Duration,
    /// Operations that wait for Redis; more are refused with 503. 10,000 are a tenth of a second's worth.
    #[serde(skip)]
    pub max_in_flight: u32,
    /// Stops asking a Redis that fails.
    #[serde(skip)]
    pub circuit_breaker: CircuitBreaker,
}

impl Default for Advanced {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(1),
            // A hundred times what it takes within a zone.
            read_timeout: Duration::from_millis(250),
            write_timeout: Duration::from_secs(1),
            max_in_flight: 10_000,
            circuit_breaker: CircuitBreaker::default(),
        }
    }
}

/// While the circuit breaker is open, Redis is not asked, and requests that need it are refused at once.
#[derive(Clone, Debug, PartialEq)]
pub struct CircuitBreaker {
    /// Failures in a row that open the circuit breaker.
    pub failure_threshold: u32,
    /// An open circuit breaker lets one operation try after this time. Redis restarts within a second.
    pub open_duration: Duration,
}

impl Default for CircuitBreaker {
    fn default() -> Self {
        Self {
            // As many as a lost connection fails at once under little load.
            failure_threshold: 5,
            open_duration: Duration::from_millis(500),
        }
    }
}

impl Settings {
    /// What is wrong beyond types and bounds: keys with a message each.
    pub fn check(&self) -> Vec<(String, String)> {
        let mut problems = Vec::new();
        let mut wrong = |key: &str, why: &str| problems.push((key.to_owned(), why.to_owned()));
        if self.urls.is_empty() {
            wrong("urls", "list at least one redis:// address");
        }
        for (place, url) in self.urls.iter().enumerate() {
            if let Err(why) = address(url) {
                wrong(&format!("urls[{place}]"), &why);
            }
        }
        let tls = self.urls.iter().filter_map(|url| address(url).ok());
        let tls: Vec<bool> = tls.map(|(is_tls, ..)| is_tls).collect();
        if tls.contains(&true) && tls.contains(&false) {
            wrong("urls", "must be all redis:// or all rediss://, not both");
        }
        if self.mode == Mode::Standalone && self.urls.len() > 1 {
            wrong("urls", "has several addresses, but mode is standalone");
        }
        if (self.mode == Mode::Sentinel) == self.master.is_empty() {
            let why = match self.mode {
                Mode::Sentinel => "name the master that the sentinels watch",
                Mode::Standalone | Mode::Cluster => "is for mode sentinel alone",
            };
            wrong("master", why);
        }
        if self.mode == Mode::Cluster && self.database != 0 {
            wrong("database", "a cluster has only database 0");
        }
        if !self.username.is_empty() && self.password.is_empty() {
            wrong("username", "is given without a password");
        }
        if !self.sentinel_username.is_empty() && self.sentinel_password.is_empty() {
            wrong("sentinel_username", "is given without a password");
        }
        if self.tls.certificate_file.is_empty() != self.tls.key_file.is_empty() {
            wrong("tls", "certificate_file and key_file go together");
        }
        if self.prefix.contains(['{', '}']) || self.prefix.len() > 64 {
            wrong(
                "prefix",
                "must be up to 64 characters without braces, which decide where a cluster keeps a key",
            );
        }
        problems
    }

    /// Whether a password is in a file, and may be replaced there.
    pub(super) fn has_password_files(&self) -> bool {
        self.password.is_of_file() || self.sentinel_password.is_of_file()
    }

    /// With the passwords that their files have now.
    pub(super) fn read_again(&self) -> Self {
        Self {
            password: self.password.read_again(),
            sentinel_password: self.sentinel_password.read_again(),
            ..self.clone()
        }
    }
}

/// Whether it is TLS, the host and the port.
pub(super) fn address(url: &str) -> Result<(bool, String, u16), String> {
    let shape = || "must look like redis://host:6379 or rediss://host:6379".to_owned();
    let (is_tls, rest) = match url.split_once("://") {
        Some(("redis", rest)) => (false, rest),
        Some(("rediss", rest)) => (true, rest),
        _ => return Err(shape()),
    };
    // What stands before the @ is not repeated: it may be a password.
    if rest.contains('@') {
        return Err("must have no user or password in it; they have keys of their own".to_owned());
    }
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    if rest.contains(['/', '?', '#']) {
        return Err("must end with the port; the database has a key of its own".to_owned());
    }
    let (host, port) = match rest.rsplit_once(':') {
        Some((host, port))
            if !host.ends_with(':') && (!host.contains(':') || host.ends_with(']')) =>
        {
            (host, port.parse().map_err(|_| shape())?)
        }
        Some(_) if !rest.ends_with(']') => return Err(shape()),
        _ => (rest, 6_379),
    };
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    let host = bare.unwrap_or(host);
    if host.is_empty() || port == 0 {
        return Err(shape());
    }
    Ok((is_tls, host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port_and_nothing_else() {
        let check = |url: &str, expected: Option<(bool, &str, u16)>| {
            let found = address(url).ok();
            let expected = expected.map(|(tls, host, port)| (tls, host.to_owned(), port));
            assert_eq!(found, expected, "{url}");
        };
        check("redis://a:1", Some((false, "a", 1)));
        check("rediss://a.b/", Some((true, "a.b", 6_379)));
        check("redis://[::1]:7000", Some((false, "::1", 7_000)));
        check("redis://[::1]", Some((false, "::1", 6_379)));
        for wrong in [
            "a:1",
            "http://a:1",
            "redis://",
            "redis://a:b",
            "redis://a:0",
            "redis://::1:1",
            "redis://a:1/2",
            "redis://me:secret@a:1",
        ] {
            check(wrong, None);
        }
    }

    #[test]
    fn a_password_in_an_address_is_not_repeated() {
        assert!(
            !address("redis://me:secret@a:1")
                .unwrap_err()
                .contains("secret")
        );
    }
}
