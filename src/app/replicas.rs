//! What this router knows of other replicas.

use super::App;

impl App {
    /// How many other replicas are connected.
    pub fn connected_peers(&self) -> usize {
        let sharing = self.sharing.as_ref();
        sharing.map_or(0, |sharing| sharing.connected())
    }
}
