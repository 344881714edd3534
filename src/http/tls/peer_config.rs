//! What rustls needs to connect to another replica.
//!
//! Replicas are found by address and share one certificate as a rule, so a replica's certificate is not compared with
//! its address. It must be one of the CA of `client_ca` and have a name of `client_names`, as for connections from it.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::sign::SingleCertAndKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};

use super::certificate::{Pair, provider};
use super::names::ClientNames;
use super::server_config::TLS12_AND_13;

pub(super) fn build(
    pair: &Pair,
    roots: Arc<RootCertStore>,
    names: &[String],
) -> Result<Arc<ClientConfig>, String> {
    let verifier = Replicas {
        roots,
        allowed: names.to_vec(),
    };
    let resolver = SingleCertAndKey::from(pair.certified.clone());
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(TLS12_AND_13)
        .map_err(|error| error.to_string())?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_cert_resolver(Arc::new(resolver));
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

/// Verifies other replicas' certificates.
#[derive(Debug)]
struct Replicas {
    roots: Arc<RootCertStore>,
    allowed: Vec<String>,
}

impl ServerCertVerifier for Replicas {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let parsed = ParsedCertificate::try_from(end_entity)?;
        let algorithms = provider().signature_verification_algorithms;
        verify_server_cert_signed_by_trust_anchor(
            &parsed,
            &self.roots,
            intermediates,
            now,
            algorithms.all,
        )?;
        if ClientNames::of(end_entity).are_allowed(&self.allowed) {
            Ok(ServerCertVerified::assertion())
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
        let algorithms = provider().signature_verification_algorithms;
        verify_tls12_signature(message, cert, dss, &algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = provider().signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, &algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}
