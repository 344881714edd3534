//! `check --live`, the store: whether Redis answers, and whether it keeps what is stored.

use std::io::{self, Write};

use crate::config::Config;
use crate::observe::metrics::Registry;
use crate::responses::Mode;
use crate::store;

/// Returns true if there is nothing to check, or nothing is wrong.
pub(super) async fn run(config: &Config, out: &mut impl Write) -> io::Result<bool> {
    let settings = &config.responses.store;
    if config.responses.mode != Mode::Stateful || settings.redis.is_none() {
        return Ok(true);
    }
    let store = store::open(settings, 0, &Registry::default())?.responses;
    if let Err(error) = store.admit().await {
        writeln!(out, "\nresponse store: FAILED: {error}")?;
        return Ok(false);
    }
    let warning = store.health().warning;
    if warning.is_empty() {
        writeln!(out, "\nresponse store: Redis answers")?;
    } else {
        writeln!(out, "\nresponse store: WRONG: {warning}")?;
    }
    Ok(warning.is_empty())
}
