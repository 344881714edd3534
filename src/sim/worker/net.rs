//! Accepts TCP connections.

use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tracing::warn;

/// Pause after a failed accept, for example when too many files are open.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

pub(super) async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                warn!(%error, "connection not accepted; retrying");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}
