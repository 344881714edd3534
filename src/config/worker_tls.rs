//! Checks the TLS settings of connections to servers, such as listed workers, and the files that they name.

use super::reader::Reader;
use super::watched::is_missing;
use crate::fleet::discovery::WorkerSpec;
use crate::http::tls::{Checked, ClientSettings};
use crate::observe;

/// Workers of a list, each with the path of its own settings.
pub(super) fn check(
    path: &str,
    workers: &[WorkerSpec],
    checked: &mut Checked,
    reader: &mut Reader,
) {
    for (index, worker) in workers.iter().enumerate() {
        let path = format!("{path}[{index}].tls");
        check_settings(&path, worker.tls.as_ref(), checked, reader);
    }
}

/// The settings at `path`, if there are any.
pub(super) fn check_settings(
    path: &str,
    tls: Option<&ClientSettings>,
    checked: &mut Checked,
    reader: &mut Reader,
) {
    let Some(tls) = tls else { return };
    for (key, error) in checked.check(tls, observe::wall_clock()) {
        let file = tls.file_of(&key);
        reader.file_problem(&format!("{path}.{key}"), is_missing(file), error);
    }
}
