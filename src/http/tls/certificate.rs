//! Certificates and keys from the contents of files, and the cryptography that reads them.

use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{InconsistentKeys, RootCertStore};
use webpki::{EndEntityCert, KeyUsage};

use super::contents::{Contents, Problem};

static PROVIDER: LazyLock<Arc<CryptoProvider>> =
    LazyLock::new(|| Arc::new(ring::default_provider()));

pub(super) fn provider() -> Arc<CryptoProvider> {
    PROVIDER.clone()
}

#[derive(Debug)]
pub(super) struct Pair {
    pub(super) certified: Arc<CertifiedKey>,
    /// When the first certificate of the chain that expires does so.
    pub(super) not_after: SystemTime,
}

/// The pair that `certificate` and `key` name, if they name one. It must fit and be in date.
pub(super) fn pair(contents: &Contents, now: SystemTime) -> Result<Option<Pair>, Vec<Problem>> {
    let (chain, key) = match (contents.file("certificate"), contents.file("key")) {
        (None, None) => return Ok(None),
        (Some(chain), Some(key)) => (chain, key),
        (Some(_), None) => {
            return Err(vec![problem("key", "is needed beside `certificate`")]);
        }
        (None, Some(_)) => {
            return Err(vec![problem("certificate", "is needed beside `key`")]);
        }
    };
    let chain = chain.and_then(|(path, pem)| Ok((path, chain_of("certificate", path, pem)?)));
    let key = key.and_then(|(path, pem)| Ok((path, key_of(path, pem)?)));
    let ((path, chain), (key_path, key)) = match (chain, key) {
        (Ok(chain), Ok(key)) => (chain, key),
        (chain, key) => return Err(chain.err().into_iter().chain(key.err()).collect()),
    };
    let mut not_after = None;
    for certificate in &chain {
        let end = in_date(path, certificate, now)
            .map_err(|message| vec![problem("certificate", &message)])?;
        not_after = not_after.min(Some(end)).or(Some(end));
    }
    let certified = CertifiedKey::from_der(chain, key, &provider()).map_err(|error| {
        let message = match error {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                format!("`{key_path}` is not the key of the certificate in `{path}`")
            }
            error => format!("`{key_path}` cannot be used: {error}"),
        };
        vec![("key".to_owned(), message)]
    })?;
    Ok(Some(Pair {
        certified: Arc::new(certified),
        not_after: not_after.unwrap_or(now),
    }))
}

/// The CA certificates in the file that a setting names, if it names one.
pub(super) fn roots(
    contents: &Contents,
    key: &'static str,
) -> Result<Option<RootCertStore>, Problem> {
    let Some(file) = contents.file(key) else {
        return Ok(None);
    };
    let (path, pem) = file?;
    let mut roots = RootCertStore::empty();
    for certificate in chain_of(key, path, pem)? {
        roots.add(certificate).map_err(|error| {
            let message = format!("`{path}` has a certificate that cannot be used: {error}");
            (key.to_owned(), message)
        })?;
    }
    Ok(Some(roots))
}

fn problem(key: &str, message: &str) -> Problem {
    (key.to_owned(), message.to_owned())
}

fn chain_of(
    key: &'static str,
    path: &str,
    pem: &[u8],
) -> Result<Vec<CertificateDer<'static>>, Problem> {
    let named = |message| (key.to_owned(), message);
    let chain: Result<Vec<_>, PemError> = CertificateDer::pem_slice_iter(pem).collect();
    let chain = chain.map_err(|error| named(format!("`{path}` is not valid PEM: {error}")))?;
    if chain.is_empty() {
        Err(named(format!(
            "`{path}` has no certificate; it must be PEM (-----BEGIN CERTIFICATE-----)"
        )))
    } else {
        Ok(chain)
    }
}

fn key_of(path: &str, pem: &[u8]) -> Result<PrivateKeyDer<'static>, Problem> {
    let is_encrypted = || memchr::memmem::find(pem, b"ENCRYPTED PRIVATE KEY").is_some();
    let message = match PrivateKeyDer::from_pem_slice(pem) {
        Ok(key) => return Ok(key),
        Err(PemError::NoItemsFound) if is_encrypted() => {
            format!("`{path}` is encrypted; write it without a passphrase (`openssl pkey`)")
        }
        Err(PemError::NoItemsFound) => {
            format!("`{path}` has no private key; it must be PEM (-----BEGIN PRIVATE KEY-----)")
        }
        Err(error) => format!("`{path}` is not valid PEM: {error}"),
    };
    Err(("key".to_owned(), message))
}

/// When a certificate expires, if it is in date now.
fn in_date(
    path: &str,
    certificate: &CertificateDer<'_>,
    now: SystemTime,
) -> Result<SystemTime, String> {
    let shown = humantime::format_rfc3339_seconds;
    let (not_before, not_after) = validity(certificate)
        .ok_or_else(|| format!("`{path}` has a certificate that cannot be read"))?;
    if now > not_after {
        return Err(format!("`{path}` expired at {}", shown(not_after)));
    }
    if now < not_before {
        let from = shown(not_before);
        return Err(format!("`{path}` is not valid before {from}"));
    }
    Ok(not_after)
}

/// After the last second that a certificate can name.
const YEAR_10000: Duration = Duration::from_secs(253_402_300_800);

/// From when until when a certificate is valid. The library checks these times and has no other access to them, so it
/// is asked about the first and the last time there is.
fn validity(certificate: &CertificateDer<'_>) -> Option<(SystemTime, SystemTime)> {
    let parsed = EndEntityCert::try_from(certificate).ok()?;
    let check = |time: Duration| {
        let time = UnixTime::since_unix_epoch(time);
        let usage = KeyUsage::server_auth();
        let verified = parsed.verify_for_usage(&[], &[], &[], time, usage, None, None);
        verified.err()
    };
    let not_before = match check(Duration::ZERO) {
        Some(webpki::Error::CertNotValidYet { not_before, .. }) => not_before.as_secs(),
        // Valid since 1970 or before.
        _ => 0,
    };
    let Some(webpki::Error::CertExpired { not_after, .. }) = check(YEAR_10000) else {
        return None;
    };
    let at = |seconds| UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
    Some((at(not_before)?, at(not_after.as_secs())?))
}
