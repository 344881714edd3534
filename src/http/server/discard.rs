//! The end of an HTTP/1 connection in the middle of a request: what its client still sends is read and dropped.

use std::future::poll_fn;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::http::tls::Socket;

/// How long a client of HTTP/1 may still send what nobody reads after its connection's last response. Were the socket closed
/// with bytes unread, the client would be reset while it sends, and many then do not look for the response.
const DISCARD_TIME: Duration = Duration::from_secs(2);

/// Reads what a client still sends that has its last response, until it closes.
pub(super) async fn discard(mut socket: Socket) {
    // hyper has closed our side unless it failed, as in the middle of a response: the client would wait for the end.
    poll_fn(|cx| {
        let _ = Pin::new(&mut socket).poll_shutdown(cx);
        Poll::Ready(())
    })
    .await;
    let closed = poll_fn(|cx| {
        let mut bytes = [MaybeUninit::uninit(); 8 << 10];
        loop {
            let mut buffer = ReadBuf::uninit(&mut bytes);
            let read = ready!(Pin::new(&mut socket).poll_read(cx, &mut buffer));
            if read.is_err() || buffer.filled().is_empty() {
                return Poll::Ready(());
            }
        }
    });
    let _ = tokio::time::timeout(DISCARD_TIME, closed).await;
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    #[tokio::test]
    async fn a_client_finds_the_end_of_its_connection_while_its_bytes_are_discarded() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut client = TcpStream::connect(address).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let mut bytes = Vec::new();
        tokio::select! {
            biased;
            read = client.read_to_end(&mut bytes) => assert_eq!(read.unwrap(), 0),
            () = discard(Socket::Clear(accepted)) => panic!("the client was not told"),
        }
    }
}
