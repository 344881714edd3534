//! Puts the values of flags into a configuration.

use super::flags::Flags;
use super::reader::Reader;
use super::settings::Config;
use crate::fleet::discovery::WorkerSpec;
use crate::peers::settings::PeerDiscovery;

pub(super) fn apply(flags: Flags, config: &mut Config, reader: &mut Reader) {
    for url in flags.workers {
        let path = format!("workers[{}]", config.workers.len());
        reader.set_by_flag(path, format!("--worker {url}"));
        config.workers.push(WorkerSpec::from(url));
    }
    if let Some(address) = flags.listen {
        reader.set_by_flag("api.listen".to_owned(), format!("--listen {address}"));
        config.api.listen = address;
    }
    if let Some(address) = flags.admin_listen {
        let flag = format!("--admin-listen {address}");
        reader.set_by_flag("admin.listen".to_owned(), flag);
        config.admin.listen = address;
    }
    if let Some(address) = flags.peers_listen {
        let flag = format!("--peers-listen {address}");
        reader.set_by_flag("peers.listen".to_owned(), flag);
        config.peers.listen = address;
    }
    if let Some(address) = flags.endpoint_picker_listen {
        let flag = format!("--endpoint-picker-listen {address}");
        reader.set_by_flag("endpoint_picker.listen".to_owned(), flag);
        config.endpoint_picker.listen = address;
    }
    if !flags.peers.is_empty() {
        let entry = config.peers.discovery.len();
        for (index, address) in flags.peers.iter().enumerate() {
            let path = format!("peers.discovery[{entry}].static[{index}]");
            reader.set_by_flag(path, format!("--peer {address}"));
        }
        let listed = PeerDiscovery::Static(flags.peers);
        config.peers.discovery.push(listed);
    }
}
