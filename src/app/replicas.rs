//! What this router knows of other replicas.

use std::net::SocketAddr;

use super::App;

impl App {
    /// Where other replicas connect, if there may be any.
    pub fn peers_address(&self) -> Option<SocketAddr> {
        let sharing = self.sharing.as_ref();
        sharing.map(|sharing| sharing.address)
    }

    pub fn connected_peers(&self) -> usize {
        let sharing = self.sharing.as_ref();
        sharing.map_or(0, |sharing| sharing.connected())
    }
}
