//! Checks TLS settings, and the files that they name.

use super::reader::Reader;
use super::settings::Config;
use super::watched::is_missing;
use super::worker_tls::{self, check_settings};
use crate::http::tls::Checked;
use crate::observe;

/// Adds everything that is wrong with TLS: of listeners, and of workers that are listed here.
pub(super) fn check(config: &Config, reader: &mut Reader) {
    let listeners = [
        ("api.tls", &config.api.tls),
        ("admin.tls", &config.admin.tls),
        ("peers.tls", &config.peers.tls),
        ("endpoint_picker.tls", &config.endpoint_picker.tls),
    ];
    for (path, tls) in listeners {
        let Some(tls) = tls else { continue };
        for (key, error) in tls.check(observe::wall_clock()) {
            let file = tls.file_of(&key);
            reader.file_problem(&format!("{path}.{key}"), is_missing(file), error);
        }
    }
    let mut checked = Checked::default();
    let traces = config.traces.as_ref();
    let traces = traces.and_then(|traces| traces.tls.as_ref());
    check_settings("traces.tls", traces, &mut checked, reader);
    let storage = config.batches.s3.as_ref();
    let storage = storage.and_then(|s3| s3.tls.as_ref());
    check_settings("batches.s3.tls", storage, &mut checked, reader);
    for (index, issuer) in config.jwt.iter().flat_map(|jwt| &jwt.issuers).enumerate() {
        let path = format!("jwt.issuers[{index}].tls");
        check_settings(&path, issuer.tls.as_ref(), &mut checked, reader);
    }
    worker_tls::check("workers", &config.workers, &mut checked, reader);
    for (index, entry) in config.discovery.iter().enumerate() {
        let path = format!("discovery[{index}].{}", entry.kind());
        let tls = entry.defaults().tls.as_ref();
        check_settings(&format!("{path}.tls"), tls, &mut checked, reader);
        let path = format!("{path}.workers");
        worker_tls::check(&path, entry.listed(), &mut checked, reader);
    }
}
