//! Checks TLS settings, and the files that they name.

use super::reader::Reader;
use super::settings::Config;
use super::worker_tls;
use crate::http::tls::{Checked, ServerSettings};
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
        for (key, error) in tls.iter().flat_map(problems) {
            reader.problem(&format!("{path}.{key}"), error);
        }
    }
    let mut checked = Checked::default();
    let traces = config
        .traces
        .iter()
        .filter_map(|traces| traces.tls.as_ref());
    for (key, error) in traces.flat_map(|tls| checked.check(tls, observe::wall_clock())) {
        reader.problem(&format!("traces.tls.{key}"), error);
    }
    let storage = config.batches.s3.iter().filter_map(|s3| s3.tls.as_ref());
    for (key, error) in storage.flat_map(|tls| checked.check(tls, observe::wall_clock())) {
        reader.problem(&format!("batches.s3.tls.{key}"), error);
    }
    for (index, issuer) in config.jwt.iter().flat_map(|jwt| &jwt.issuers).enumerate() {
        let tls = issuer.tls.iter();
        for (key, error) in tls.flat_map(|tls| checked.check(tls, observe::wall_clock())) {
            reader.problem(&format!("jwt.issuers[{index}].tls.{key}"), error);
        }
    }
    worker_tls::check("workers", &config.workers, &mut checked, reader);
    for (index, entry) in config.discovery.iter().enumerate() {
        let path = format!("discovery[{index}].{}", entry.kind());
        if let Some(tls) = &entry.defaults().tls {
            for (key, error) in checked.check(tls, observe::wall_clock()) {
                reader.problem(&format!("{path}.tls.{key}"), error);
            }
        }
        let path = format!("{path}.workers");
        worker_tls::check(&path, entry.listed(), &mut checked, reader);
    }
}

fn problems(tls: &ServerSettings) -> Vec<(String, String)> {
    tls.check(observe::wall_clock())
}
