//! Where an issuer's keys are.

use hyper::Uri;

use crate::http::tls::ClientSettings;

/// A file, or what a server answers to `GET`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Location {
    File(String),
    Url {
        /// `host:port`.
        authority: String,
        path: String,
        tls: Option<ClientSettings>,
    },
}

impl Location {
    /// The location that a URL or a path names. A path may also be written as `file:/path`.
    pub(super) fn of(text: &str, settings: ClientSettings) -> Result<Self, String> {
        let expected =
            "write a URL such as `https://login.example.com/jwks.json`, or the path of a file";
        if text.is_empty() {
            return Err(format!("is missing: {expected}"));
        }
        let is_https = text.starts_with("https://");
        if !is_https && !text.starts_with("http://") {
            let path = text.strip_prefix("file:").unwrap_or(text);
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.contains("://") {
                Err(format!(
                    "`{text}` is neither `http` nor `https`; {expected}"
                ))
            } else {
                Ok(Self::File(path.to_owned()))
            };
        }
        let wrong = || format!("`{text}` is no URL; {expected}");
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        let host = uri
            .host()
            .filter(|host| !host.is_empty())
            .ok_or_else(wrong)?;
        if uri
            .authority()
            .is_some_and(|authority| authority.as_str().contains('@'))
        {
            return Err("has a user or a password, which is not sent; leave it out".to_owned());
        }
        let port = uri.port_u16().unwrap_or(if is_https { 443 } else { 80 });
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        Ok(Self::Url {
            authority: format!("{host}:{port}"),
            path: path.to_owned(),
            tls: is_https.then_some(settings),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_in_a_file_or_behind_a_url() {
        let read = |text: &str| Location::of(text, ClientSettings::default());
        for path in [
            "/etc/jwks.json",
            "file:/etc/jwks.json",
            "file:///etc/jwks.json",
        ] {
            assert_eq!(read(path), Ok(Location::File("/etc/jwks.json".to_owned())));
        }
        let url = |authority: &str, path: &str, is_https: bool| Location::Url {
            authority: authority.to_owned(),
            path: path.to_owned(),
            tls: is_https.then(ClientSettings::default),
        };
        assert_eq!(
            read("https://a/keys?x=1"),
            Ok(url("a:443", "/keys?x=1", true))
        );
        assert_eq!(read("http://[::1]:81"), Ok(url("[::1]:81", "/", false)));
        for wrong in ["", "ftp://a/b", "https://", "https://user:secret@a/b"] {
            let error = read(wrong).unwrap_err();
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
