//! Where Redis is and how long it is waited for.

use serde::{Deserialize, Serialize};

use crate::secret::Secret;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    pub mode: Mode,
    /// `redis://host:port`, or `rediss://host:port` for TLS: the server, the sentinels, or some nodes of
    /// the cluster.
    pub urls: Vec<String>,
    /// The master's name, for `sentinel`.
    pub master: String,
    pub username: String,
    pub password: Secret,
    pub sentinel_username: String,
    pub sentinel_password: Secret,
    /// Of one server; a cluster has only 0.
    pub database: u32,
    pub tls: Tls,
    /// What all keys begin with.
    pub prefix: String,
    pub connect_timeout_ms: u64,
    pub read_timeout_ms: u64,
    pub write_timeout_ms: u64,
    /// Carriers with a connection of their own; the others, and all in a cluster, share one.
    pub carrier_connections_max: u32,
    /// Operations that Redis has not answered. More are refused.
    pub in_flight_max: u32,
    /// Values from this size on are compressed.
    pub compress_bytes_min: u64,
    pub breaker: Breaker,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            mode: Mode::Standalone,
            urls: Vec::new(),
            master: String::new(),
            username: String::new(),
            password: Secret::default(),
            sentinel_username: String::new(),
            sentinel_password: Secret::default(),
            database: 0,
            tls: Tls::default(),
            prefix: "wr:".to_owned(),
            // Within a zone a connection takes a millisecond, with TLS ten.
            connect_timeout_ms: 1_000,
            // A hundred times what they take within a zone. A write waits longer, since after it is given
            // up nobody knows whether it was done.
            read_timeout_ms: 250,
            write_timeout_ms: 1_000,
            // One a core: what a request asks costs no change of threads. A hundred replicas of so many
            // leave a third of the 10,000 clients that Redis takes as it comes.
            carrier_connections_max: 64,
            // Redis does 100,000 a second: a tenth of a second's worth.
            in_flight_max: 10_000,
            // Below, it costs a twentieth of a stored response's CPU, for a kilobyte or two in Redis.
            compress_bytes_min: 4_096,
            breaker: Breaker::default(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    Standalone,
    Sentinel,
    Cluster,
}

/// For `rediss://`. Files in PEM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tls {
    /// Who may have signed the server's certificate; empty for the system's own list.
    pub ca_file: String,
    /// Our own certificate and its key, where the server asks for one.
    pub certificate_file: String,
    pub key_file: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Breaker {
    /// Failures in a row until Redis is not asked any more.
    pub failures: u32,
    /// How long until one operation may try again.
    pub open_ms: u64,
}

impl Default for Breaker {
    fn default() -> Self {
        // As many as a lost connection fails at once under little load; and Redis restarts within a second.
        Self {
            failures: 5,
            open_ms: 500,
        }
    }
}

impl Settings {
    /// What is wrong, with paths below `store`. Where nothing is `used`, missing addresses are none.
    pub(in crate::store) fn problems(&self, used: bool) -> Vec<(String, String)> {
        let mut problems = Vec::new();
        let mut wrong = |key: &str, reason: String| problems.push((format!("redis.{key}"), reason));
        if used && self.urls.is_empty() {
            wrong("urls", "list at least one redis:// address".to_owned());
        }
        for (place, url) in self.urls.iter().enumerate() {
            if let Err(reason) = address(url) {
                wrong(&format!("urls[{place}]"), reason);
            }
        }
        let tls = self.urls.iter().filter_map(|url| address(url).ok());
        let tls: Vec<bool> = tls.map(|(is_tls, ..)| is_tls).collect();
        if tls.contains(&true) && tls.contains(&false) {
            wrong(
                "urls",
                "must be all redis:// or all rediss://, not both".to_owned(),
            );
        }
        if used && self.mode == Mode::Standalone && self.urls.len() > 1 {
            wrong(
                "urls",
                "has several addresses, but mode is standalone".to_owned(),
            );
        }
        if used && (self.mode == Mode::Sentinel) == self.master.is_empty() {
            let reason = match self.mode {
                Mode::Sentinel => "name the master that the sentinels watch",
                Mode::Standalone | Mode::Cluster => "is for mode sentinel alone",
            };
            wrong("master", reason.to_owned());
        }
        if self.mode == Mode::Cluster && self.database != 0 {
            wrong("database", "a cluster has only database 0".to_owned());
        }
        if !self.username.is_empty() && self.password.is_empty() {
            wrong("username", "is given without a password".to_owned());
        }
        if !self.sentinel_username.is_empty() && self.sentinel_password.is_empty() {
            wrong(
                "sentinel_username",
                "is given without a password".to_owned(),
            );
        }
        if self.tls.certificate_file.is_empty() != self.tls.key_file.is_empty() {
            wrong(
                "tls",
                "certificate_file and key_file go together".to_owned(),
            );
        }
        if self.prefix.contains(['{', '}']) || self.prefix.len() > 64 {
            wrong(
                "prefix",
                "must be up to 64 characters without braces, which decide where a cluster keeps a key"
                    .to_owned(),
            );
        }
        for (key, value) in [
            ("connect_timeout_ms", self.connect_timeout_ms),
            ("read_timeout_ms", self.read_timeout_ms),
            ("write_timeout_ms", self.write_timeout_ms),
            ("in_flight_max", self.in_flight_max.into()),
            ("breaker.failures", self.breaker.failures.into()),
            ("breaker.open_ms", self.breaker.open_ms),
        ] {
            if value == 0 {
                wrong(key, "must be at least 1".to_owned());
            }
            if key.ends_with("_ms") && value > 3_600_000 {
                wrong(key, format!("{value} ms is more than an hour"));
            }
        }
        problems
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
    // Not even what stands before the @ is told: it would be a password.
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
