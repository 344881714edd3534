//! What rustls needs to connect to a worker, from the settings and the contents of their files.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::SystemTime;

use rustls::pki_types::ServerName;
use rustls::sign::SingleCertAndKey;
use rustls::{ClientConfig, RootCertStore};

use super::certificate::{self, provider};
use super::contents::{self, Contents, Named, Problem};
use super::server_config::TLS12_AND_13;
use super::settings::ClientSettings;

/// What connections to workers are made with.
#[derive(Debug)]
pub(super) struct Built {
    /// Offers no protocol but HTTP/1.1.
    pub(super) http1: Arc<ClientConfig>,
    /// Offers no protocol but HTTP/2, for gRPC.
    pub(super) http2: Arc<ClientConfig>,
    /// When the client certificate expires, if there is one.
    pub(super) not_after: Option<SystemTime>,
}

impl ClientSettings {
    pub(super) fn files(&self) -> [Named<'_>; 3] {
        [
            ("ca", &self.ca),
            ("certificate", &self.certificate),
            ("key", &self.key),
        ]
    }

    /// The path of the file that a key names; empty if it names none.
    pub fn file_of(&self, key: &str) -> &str {
        contents::path_of(&self.files(), key)
    }

    /// Everything that is wrong with the TLS of a worker, files included: keys with a message each.
    pub fn check(&self, now: SystemTime) -> Vec<(String, String)> {
        let contents = Contents::read(&self.files());
        self.build(&contents, now).err().unwrap_or_default()
    }

    /// What is wrong with `server_name`.
    pub fn check_server_name(&self) -> Result<(), String> {
        if self.server_name.is_empty() {
            Ok(())
        } else {
            server_name(&self.server_name).map(drop)
        }
    }

    /// What connections are made with, or everything that is wrong.
    pub(super) fn build(
        &self,
        contents: &Contents,
        now: SystemTime,
    ) -> Result<Built, Vec<Problem>> {
        let mut problems = Vec::new();
        let roots = match certificate::roots(contents, "ca") {
            Ok(Some(roots)) => Some(roots),
            Ok(None) => system_roots()
                .map_err(|error| problems.push(("ca".to_owned(), error)))
                .ok(),
            Err(problem) => {
                problems.push(problem);
                None
            }
        };
        let pair = certificate::pair(contents, now).unwrap_or_else(|found| {
            problems.extend(found);
            None
        });
        if let Err(error) = self.check_server_name() {
            problems.push(("server_name".to_owned(), error));
        }
        let (Some(roots), true) = (roots, problems.is_empty()) else {
            return Err(problems);
        };
        let builder = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(TLS12_AND_13)
            .map_err(|error| vec![("ca".to_owned(), error.to_string())])?
            .with_root_certificates(roots);
        let not_after = pair.as_ref().map(|pair| pair.not_after);
        let mut http1 = match pair {
            None => builder.with_no_client_auth(),
            Some(pair) => {
                let resolver = SingleCertAndKey::from(pair.certified);
                builder.with_client_cert_resolver(Arc::new(resolver))
            }
        };
        let mut http2 = http1.clone();
        http1.alpn_protocols = vec![b"http/1.1".to_vec()];
        http2.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Built {
            http1: Arc::new(http1),
            http2: Arc::new(http2),
            not_after,
        })
    }
}

/// Checks each setting once: a thousand workers have the same.
#[derive(Debug, Default)]
pub struct Checked(BTreeSet<ClientSettings>);

impl Checked {
    /// What is wrong with settings that were not checked yet.
    pub fn check(&mut self, settings: &ClientSettings, now: SystemTime) -> Vec<Problem> {
        if self.0.insert(settings.clone()) {
            settings.check(now)
        } else {
            Vec::new()
        }
    }
}

/// A host name or an address. Certificates have neither the brackets of addresses nor the last dot of names.
pub(super) fn server_name(name: &str) -> Result<ServerName<'static>, String> {
    let bare = name
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    let bare = bare.unwrap_or(name);
    let bare = bare.strip_suffix('.').unwrap_or(bare);
    ServerName::try_from(bare.to_owned())
        .map_err(|_| format!("`{name}` is no host name or IP address"))
}

/// The CAs that the operating system trusts.
fn system_roots() -> Result<RootCertStore, String> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(found.certs);
    match added {
        0 => Err("is needed: the operating system has no CA certificates".to_owned()),
        _ => Ok(roots),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_are_written_as_in_urls() {
        let check = |name: &str, expected: Option<&str>| {
            let found = server_name(name).ok();
            let found = found.map(|found| found.to_str().into_owned());
            assert_eq!(found.as_deref(), expected, "{name}");
        };
        check("gpu-0.example.com", Some("gpu-0.example.com"));
        check(
            "engines.prod.svc.cluster.local.",
            Some("engines.prod.svc.cluster.local"),
        );
        check("10.0.0.1", Some("10.0.0.1"));
        check("[::1]", Some("::1"));
        check("no name", None);
        check("", None);
    }
}
