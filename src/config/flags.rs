//! Values that the command line gives instead of the file, or without one.

use super::reader::Reader;
use super::settings::Config;
use crate::fleet::discovery::WorkerSpec;

/// The flags of `serve` and `check` that set values.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// `--worker`: URLs, added to those of the file.
    pub workers: Vec<String>,
    /// `--listen`
    pub listen: Option<String>,
    /// `--admin-listen`
    pub admin_listen: Option<String>,
}

impl Flags {
    pub(super) fn apply(self, config: &mut Config, reader: &mut Reader) {
        for url in self.workers {
            let path = format!("workers[{}]", config.workers.len());
            reader.set_by_flag(path, format!("--worker {url}"));
            config.workers.push(WorkerSpec::from(url));
        }
        if let Some(address) = self.listen {
            reader.set_by_flag("api.listen".to_owned(), format!("--listen {address}"));
            config.api.listen = address;
        }
        if let Some(address) = self.admin_listen {
            let flag = format!("--admin-listen {address}");
            reader.set_by_flag("admin.listen".to_owned(), flag);
            config.admin.listen = address;
        }
    }
}
