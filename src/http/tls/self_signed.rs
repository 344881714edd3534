//! A certificate of the process's own, for clients that encrypt and do not verify.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;

use super::certificate::{Pair, provider};
use super::contents::Problem;

/// Whoever does verify looks for the name first.
const NAME: &str = "localhost";

/// Seconds after 1970: 4000-01-01. It must outlive the process, which has no other way to renew it than to start again.
const NOT_AFTER: Duration = Duration::from_secs(64_060_588_800);

/// A new key (P-256) and its certificate. The key is in no file and leaves the process in no way.
pub(super) fn pair() -> Result<Pair, Vec<Problem>> {
    let named = |error: &dyn std::fmt::Display| {
        let message = format!("no certificate can be made: {error}");
        vec![("self_signed".to_owned(), message)]
    };
    let (key, certificate) = made().map_err(|error| named(&error))?;
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let certified = CertifiedKey::from_der(vec![certificate], key, &provider());
    Ok(Pair {
        certified: Arc::new(certified.map_err(|error| named(&error))?),
        not_after: UNIX_EPOCH + NOT_AFTER,
    })
}

fn made() -> Result<(KeyPair, CertificateDer<'static>), rcgen::Error> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new([NAME.to_owned()])?;
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(4000, 1, 1);
    let certificate = params.self_signed(&key)?;
    Ok((key, certificate.der().clone()))
}
