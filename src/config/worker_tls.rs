//! Checks the TLS settings of listed workers, and the files that they name.

use super::reader::Reader;
use crate::fleet::discovery::WorkerSpec;
use crate::http::tls::Checked;
use crate::observe;

/// Workers of a list, each with the path of its own settings.
pub(super) fn check(
    path: &str,
    workers: &[WorkerSpec],
    checked: &mut Checked,
    reader: &mut Reader,
) {
    for (index, worker) in workers.iter().enumerate() {
        let Some(tls) = &worker.tls else { continue };
        for (key, error) in checked.check(tls, observe::wall_clock()) {
            reader.problem(&format!("{path}[{index}].tls.{key}"), error);
        }
    }
}
