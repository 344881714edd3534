//! What rustls needs to serve connections, from a listener's settings and the contents of their files.

use std::sync::Arc;
use std::time::SystemTime;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::SingleCertAndKey;
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, ServerConfig,
    SignatureScheme, SupportedProtocolVersion, version,
};

use super::certificate::{self, Pair, provider};
use super::contents::{self, Contents, Named, Problem};
use super::names::ClientNames;
use super::self_signed;
use super::settings::{ClientAuth, MinVersion, ServerSettings};

pub(super) const TLS12_AND_13: &[&SupportedProtocolVersion] = &[&version::TLS13, &version::TLS12];
pub(super) const TLS13: &[&SupportedProtocolVersion] = &[&version::TLS13];

/// What connections are served with.
#[derive(Debug)]
pub(super) struct Built {
    pub(super) config: Arc<ServerConfig>,
    pub(super) pair: Pair,
    /// The CAs of `client_ca`.
    pub(super) roots: Option<Arc<RootCertStore>>,
}

impl ServerSettings {
    pub(super) fn files(&self) -> [Named<'_>; 3] {
        [
            ("certificate", &self.certificate),
            ("key", &self.key),
            ("client_ca", &self.client_ca),
        ]
    }

    /// The path of the file that a key names; empty if it names none.
    pub fn file_of(&self, key: &str) -> &str {
        contents::path_of(&self.files(), key)
    }

    /// Everything that is wrong with a listener's TLS, files included: keys with a message each.
    pub fn check(&self, now: SystemTime) -> Vec<(String, String)> {
        let contents = Contents::read(&self.files());
        self.build(&contents, &[], now).err().unwrap_or_default()
    }

    /// What connections are served with, or everything that is wrong.
    pub(super) fn build(
        &self,
        contents: &Contents,
        alpn: &[&[u8]],
        now: SystemTime,
    ) -> Result<Built, Vec<Problem>> {
        let mut problems = Vec::new();
        let names_files = !(self.certificate.is_empty() && self.key.is_empty());
        if !names_files && !self.self_signed {
            let message = "is needed: the path of the listener's certificate in PEM (or `self_signed: true`, which clients cannot verify)";
            problems.push(("certificate".to_owned(), message.to_owned()));
        }
        if names_files && self.self_signed {
            let message = "leave it out, or leave out `certificate` and `key`";
            problems.push(("self_signed".to_owned(), message.to_owned()));
        }
        if self.client_ca.is_empty() {
            let unused = [
                ("client_names", !self.client_names.is_empty()),
                ("client_auth", self.client_auth != ClientAuth::default()),
            ];
            for (key, _) in unused.into_iter().filter(|(_, is_set)| *is_set) {
                let message = "needs `client_ca`, by which clients' certificates are verified";
                problems.push((key.to_owned(), message.to_owned()));
            }
        }
        for (index, name) in self.client_names.iter().enumerate() {
            if name.is_empty() || name.contains(char::is_whitespace) {
                let message =
                    format!("`{name}` is no DNS name or URI; wildcards are not supported");
                problems.push((format!("client_names[{index}]"), message));
            } else if name.contains('*') {
                let message = format!("`{name}`: wildcards are not supported; list each name");
                problems.push((format!("client_names[{index}]"), message));
            }
        }
        let pair = if self.self_signed {
            self_signed::pair().map(Some)
        } else {
            certificate::pair(contents, now)
        };
        let pair = pair.unwrap_or_else(|found| {
            problems.extend(found);
            None
        });
        let roots = certificate::roots(contents, "client_ca").unwrap_or_else(|found| {
            problems.push(found);
            None
        });
        match pair {
            Some(pair) if problems.is_empty() => self
                .assemble(pair, roots.map(Arc::new), alpn)
                .map_err(|error| vec![("certificate".to_owned(), error)]),
            _ => Err(problems),
        }
    }

    fn assemble(
        &self,
        pair: Pair,
        roots: Option<Arc<RootCertStore>>,
        alpn: &[&[u8]],
    ) -> Result<Built, String> {
        let versions = match self.min_version {
            MinVersion::Tls12 => TLS12_AND_13,
            MinVersion::Tls13 => TLS13,
        };
        let builder = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(versions)
            .map_err(|error| error.to_string())?;
        let builder = match &roots {
            None => builder.with_no_client_auth(),
            Some(roots) => {
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(roots.clone(), provider());
                let verifier = match self.client_auth {
                    ClientAuth::Required => verifier,
                    ClientAuth::Optional => verifier.allow_unauthenticated(),
                };
                builder.with_client_cert_verifier(Arc::new(NamedClients {
                    verifier: verifier.build().map_err(|error| error.to_string())?,
                    allowed: self.client_names.clone(),
                }))
            }
        };
        let resolver = SingleCertAndKey::from(pair.certified.clone());
        let mut config = builder.with_cert_resolver(Arc::new(resolver));
        config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
        if roots.is_none() {
            // Sessions are resumed without memory here.
            config.ticketer =
                rustls::crypto::ring::Ticketer::new().map_err(|error| error.to_string())?;
        } else {
            // Whoever resumes a session has the certificate that it began with, which is not verified again, and gets new
            // tickets: one that has expired would be accepted for as long as the files stay the same.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
        }
        Ok(Built {
            config: Arc::new(config),
            pair,
            roots,
        })
    }
}

/// Verifies clients' certificates, and that one of their names is allowed.
#[derive(Debug)]
struct NamedClients {
    verifier: Arc<dyn ClientCertVerifier>,
    allowed: Vec<String>,
}

impl ClientCertVerifier for NamedClients {
    fn offer_client_auth(&self) -> bool {
        self.verifier.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.verifier.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.verifier.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self
            .verifier
            .verify_client_cert(end_entity, intermediates, now)?;
        if ClientNames::of(end_entity).are_allowed(&self.allowed) {
            Ok(verified)
        } else {
            Err(CertificateError::ApplicationVerificationFailure.into())
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rcgen::{CertificateParams, KeyPair};
    use rustls::{ClientConfig, ClientConnection, Connection, HandshakeKind, ServerConnection};

    use super::*;
    use crate::observe;

    fn pass(from: &mut Connection, to: &mut Connection) {
        let mut bytes = Vec::new();
        while from.wants_write() {
            from.write_tls(&mut bytes).unwrap();
        }
        let mut unread = &bytes[..];
        while !unread.is_empty() {
            to.read_tls(&mut unread).unwrap();
            to.process_new_packets().unwrap();
        }
    }

    /// Shakes hands, and takes the tickets that come behind that.
    fn shake_hands(client: &Arc<ClientConfig>, server: &Arc<ServerConfig>) -> HandshakeKind {
        let name = "localhost".try_into().unwrap();
        let client = ClientConnection::new(client.clone(), name).unwrap();
        let server = ServerConnection::new(server.clone()).unwrap();
        let (mut client, mut server) = (Connection::from(client), Connection::from(server));
        for _ in 0..4 {
            pass(&mut client, &mut server);
            pass(&mut server, &mut client);
        }
        server.handshake_kind().unwrap()
    }

    #[test]
    fn no_session_is_resumed_with_a_client_certificate_that_would_not_be_verified_again() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(["localhost".to_owned()]).unwrap();
        let certificate = params.self_signed(&key).unwrap();
        fs::write(at("tls.crt"), certificate.pem()).unwrap();
        fs::write(at("tls.key"), key.serialize_pem()).unwrap();
        let build = |client_ca: String| {
            let settings = ServerSettings {
                certificate: at("tls.crt"),
                key: at("tls.key"),
                client_ca,
                ..ServerSettings::default()
            };
            let contents = Contents::read(&settings.files());
            settings
                .build(&contents, &[], observe::wall_clock())
                .unwrap()
        };
        let (without, with) = (build(String::new()), build(at("tls.crt")));
        let roots = with.roots.unwrap();
        for versions in [TLS13, &[&version::TLS12]] {
            let resolver = SingleCertAndKey::from(with.pair.certified.clone());
            let client = ClientConfig::builder_with_provider(provider())
                .with_protocol_versions(versions)
                .unwrap()
                .with_root_certificates(roots.clone())
                .with_client_cert_resolver(Arc::new(resolver));
            let client = Arc::new(client);
            let both = |server| [shake_hands(&client, server), shake_hands(&client, server)];
            let full = HandshakeKind::Full;
            assert_eq!(both(&with.config), [full, full]);
            assert_eq!(both(&without.config), [full, HandshakeKind::Resumed]);
        }
    }
}
