//! A network between two replicas that can be cut: connections stay open, and no byte passes.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Passes connections on to one address.
#[derive(Debug)]
pub(super) struct Proxy {
    pub(super) address: SocketAddr,
    is_cut: watch::Sender<bool>,
}

impl Proxy {
    pub(super) async fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let is_cut = watch::Sender::new(false);
        let cut = is_cut.subscribe();
        tokio::spawn(async move {
            loop {
                let (dialed, _) = listener.accept().await.unwrap();
                let cut = cut.clone();
                tokio::spawn(async move {
                    // A connection that is opened while the network is cut is not answered.
                    until_whole(&mut cut.clone()).await;
                    let Ok(accepted) = TcpStream::connect(to).await else {
                        return;
                    };
                    let _ = (dialed.set_nodelay(true), accepted.set_nodelay(true));
                    let (from_dialer, to_dialer) = dialed.into_split();
                    let (from_acceptor, to_acceptor) = accepted.into_split();
                    tokio::select! {
                        () = pass(from_dialer, to_acceptor, cut.clone()) => {}
                        () = pass(from_acceptor, to_dialer, cut) => {}
                    }
                });
            }
        });
        Self { address, is_cut }
    }

    pub(super) fn cut(&self) {
        self.is_cut.send_replace(true);
    }

    pub(super) fn heal(&self) {
        self.is_cut.send_replace(false);
    }
}

async fn until_whole(is_cut: &mut watch::Receiver<bool>) {
    let _ = is_cut.wait_for(|is_cut| !is_cut).await;
}

async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut is_cut: watch::Receiver<bool>) {
    let mut buffer = vec![0; 16_384];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        until_whole(&mut is_cut).await;
        if to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
    // The end does not pass a cut network either.
    until_whole(&mut is_cut).await;
}
