//! The URL of an endpoint, in its parts. Pure.

use std::net::IpAddr;

use hyper::Uri;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) is_https: bool,
    /// A name or an address, an IPv6 one without its brackets.
    pub(super) host: String,
    pub(super) port: u16,
    /// As the `host` header names it.
    pub(super) authority: String,
    pub(super) path: String,
}

impl Target {
    pub(super) fn of(text: &str) -> Result<Self, String> {
        let expected = "write a URL such as `https://example.com/hooks/responses`";
        if text.is_empty() {
            return Err(format!("is missing: {expected}"));
        }
        // What is wrong may be a secret that stands in the URL, so it is not repeated.
        let wrong = || format!("is no URL; {expected}");
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        let is_https = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(format!("is neither `https` nor `http`; {expected}")),
        };
        let authority = uri.authority().ok_or_else(wrong)?;
        if authority.as_str().contains('@') {
            return Err("has a user or a password, which is not sent; leave it out".to_owned());
        }
        let host = authority.host();
        let bare = host
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'));
        let host = bare.unwrap_or(host);
        if host.is_empty() || (bare.is_some() && host.parse::<IpAddr>().is_err()) {
            return Err(wrong());
        }
        let default_port = if is_https { 443 } else { 80 };
        Ok(Self {
            is_https,
            host: host.to_owned(),
            port: authority.port_u16().unwrap_or(default_port),
            authority: authority.as_str().to_owned(),
            path: uri
                .path_and_query()
                .map_or_else(|| "/".to_owned(), ToString::to_string),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_taken_apart() {
        let check = |text: &str, host: &str, port: u16, path: &str| {
            let target = Target::of(text).unwrap();
            assert_eq!(
                (&*target.host, target.port, &*target.path),
                (host, port, path)
            );
        };
        check("https://example.com/a?b=c", "example.com", 443, "/a?b=c");
        check("https://example.com", "example.com", 443, "/");
        check("HTTPS://example.com/a", "example.com", 443, "/a");
        check("http://10.0.0.1:8080/x", "10.0.0.1", 8080, "/x");
        check("https://[2001:db8::1]:8443/", "2001:db8::1", 8443, "/");
        for wrong in [
            "",
            "example.com/hook",
            "ftp://example.com/",
            "https://",
            "https://user:sesame@example.com/",
            "https://exa mple.com/",
            "/hook",
            "https://[fe80::1%25eth0]/",
        ] {
            let error = Target::of(wrong).unwrap_err();
            assert!(!error.contains("sesame"), "{wrong}: {error}");
        }
    }
}
