//! Connections whose peer is gone without a word.

use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// A peer whose host or network is gone says nothing: after this time without a sign of life a probe is sent, and again after each
/// [`PROBE_INTERVAL`]. Engines are silent for minutes while they compute; their hosts answer all the same.
const PROBE_AFTER: Duration = Duration::from_secs(30);
const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// Probes without an answer after which the connection is lost: a minute after the last sign of life.
const PROBES: u32 = 3;
/// What was sent and is not acknowledged for this long loses the connection, too.
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(60);

/// Has the kernel break a connection whose peer is gone. Where it cannot, the time limits of requests do it later.
pub(super) fn lose_dead_peers(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    let probes = TcpKeepalive::new().with_time(PROBE_AFTER);
    let probes = probes.with_interval(PROBE_INTERVAL).with_retries(PROBES);
    let _ = socket.set_tcp_keepalive(&probes);
    #[cfg(target_os = "linux")]
    let _ = socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED_MAX));
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn the_kernel_looks_for_dead_peers() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await;
        let stream = stream.unwrap();
        lose_dead_peers(&stream);
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().unwrap());
        #[cfg(target_os = "linux")]
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(UNACKNOWLEDGED_MAX));
    }
}
