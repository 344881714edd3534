//! Values that the command line gives instead of the file, or without one.

use super::reader::Reader;
use super::settings::Config;
use crate::fleet::discovery::WorkerSpec;
use crate::peers::settings::PeerDiscovery;

/// The flags of `serve` and `check` that set values.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// `--worker`: URLs, added to those of the file.
    pub workers: Vec<String>,
    /// `--listen`
    pub listen: Option<String>,
    /// `--admin-listen`
    pub admin_listen: Option<String>,
    /// `--peers-listen`
    pub peers_listen: Option<String>,
    /// `--peer`: addresses, added to those of the file.
    pub peers: Vec<String>,
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
        if let Some(address) = self.peers_listen {
            let flag = format!("--peers-listen {address}");
            reader.set_by_flag("peers.listen".to_owned(), flag);
            config.peers.listen = address;
        }
        if !self.peers.is_empty() {
            let entry = config.peers.discovery.len();
            for (index, address) in self.peers.iter().enumerate() {
                let path = format!("peers.discovery[{entry}].static[{index}]");
                reader.set_by_flag(path, format!("--peer {address}"));
            }
            let listed = PeerDiscovery::Static(self.peers);
            config.peers.discovery.push(listed);
        }
    }
}
