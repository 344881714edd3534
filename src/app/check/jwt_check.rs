//! `check --live`, tokens: whether the public keys of their issuers can be read.

use std::io::{self, Write};

use crate::config::Config;
use crate::http::tls::Clients;
use crate::jwt;

/// Returns true if there is nothing to check, or nothing is wrong.
pub(super) async fn run(
    config: &Config,
    clients: &Clients,
    out: &mut impl Write,
) -> io::Result<bool> {
    let mut is_good = true;
    let Some(settings) = &config.jwt else {
        return Ok(is_good);
    };
    for (issuer, found) in jwt::look_once(settings, clients).await {
        match found {
            Ok(keys) => writeln!(out, "\nkeys of {issuer}: {keys} can verify tokens")?,
            Err(error) => {
                is_good = false;
                writeln!(out, "\nkeys of {issuer}: FAILED: {error}")?;
            }
        }
    }
    Ok(is_good)
}
