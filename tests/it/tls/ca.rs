//! Certificate authorities, and the files of their certificates.

use std::path::Path;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, SanType};
use rustls::RootCertStore;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use tempfile::TempDir;
use warmroute::http::tls::{ClientSettings, ServerSettings};

/// A certificate authority.
pub(super) struct Ca(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, in PEM.
#[derive(Clone)]
pub(super) struct Pair {
    pub(super) certificate: String,
    pub(super) key: String,
}

impl Ca {
    pub(super) fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        Self(CertifiedIssuer::self_signed(params, key).unwrap())
    }

    pub(super) fn pem(&self) -> String {
        self.0.pem()
    }

    /// A certificate for names, addresses and URIs, which is valid in the years from `from` to `until`.
    pub(super) fn issue_for_years(&self, names: &[&str], from: i32, until: i32) -> Pair {
        let (uris, names): (Vec<&str>, Vec<&str>) =
            names.iter().partition(|name| name.contains("://"));
        let names: Vec<String> = names.into_iter().map(str::to_owned).collect();
        let mut params = CertificateParams::new(names).unwrap();
        let uris = uris.into_iter();
        let uris = uris.map(|uri| SanType::URI(uri.try_into().unwrap()));
        params.subject_alt_names.extend(uris);
        params.not_before = rcgen::date_time_ymd(from, 1, 1);
        params.not_after = rcgen::date_time_ymd(until, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Pair {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        }
    }

    pub(super) fn issue(&self, names: &[&str]) -> Pair {
        self.issue_for_years(names, 2020, 2100)
    }

    pub(super) fn roots(&self) -> Arc<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(self.0.der().clone()).unwrap();
        Arc::new(roots)
    }
}

impl Pair {
    pub(super) fn chain(&self) -> Vec<rustls::pki_types::CertificateDer<'static>> {
        let pem = self.certificate.as_bytes();
        let chain = rustls::pki_types::CertificateDer::pem_slice_iter(pem);
        chain.map(Result::unwrap).collect()
    }

    pub(super) fn private_key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::from_pem_slice(self.key.as_bytes()).unwrap()
    }
}

/// A folder that does not outlive the test.
pub(super) struct Folder(TempDir);

impl Folder {
    pub(super) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes a file, and gives its path.
    pub(super) fn write(&self, name: &str, text: &str) -> String {
        let path = self.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// A listener's settings with this pair.
    pub(super) fn server(&self, pair: &Pair) -> ServerSettings {
        ServerSettings {
            certificate: self.write("tls.crt", &pair.certificate),
            key: self.write("tls.key", &pair.key),
            ..ServerSettings::default()
        }
    }

    /// A worker's settings with this CA, and a client certificate.
    pub(super) fn client(&self, ca: &Ca, pair: Option<&Pair>) -> ClientSettings {
        let mut settings = ClientSettings {
            ca: self.write("worker-ca.crt", &ca.pem()),
            ..ClientSettings::default()
        };
        if let Some(pair) = pair {
            settings.certificate = self.write("client.crt", &pair.certificate);
            settings.key = self.write("client.key", &pair.key);
        }
        settings
    }
}
