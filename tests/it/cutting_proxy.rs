//! A proxy between a router and an engine, which cuts connections as the process of an engine does that ends.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use warmroute::config::Config;

use crate::cluster::Engine;

/// Which connections are closed when a POST comes over them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    None,
    All,
    /// The connections over which there was a request before.
    KeptAlive,
}

#[derive(Clone, Debug)]
pub(crate) struct CuttingProxy {
    pub(crate) address: SocketAddr,
    engine: SocketAddr,
    cut: Arc<Mutex<Cut>>,
    cuts: Arc<AtomicUsize>,
    open: Arc<AtomicUsize>,
}

impl CuttingProxy {
    /// One in front of each engine.
    pub(crate) async fn of_all(engines: &[Engine]) -> Vec<Self> {
        let mut proxies = Vec::new();
        for engine in engines {
            proxies.push(Self::of(engine.address).await);
        }
        proxies
    }

    /// Has the router connect to the proxies instead of the engines.
    pub(crate) fn put_between(proxies: &[Self], config: &mut Config) {
        for (worker, proxy) in config.workers.iter_mut().zip(proxies) {
            worker.url = format!("http://{}", proxy.address);
        }
    }

    pub(crate) fn cut(&self, cut: Cut) {
        *self.cut.lock() = cut;
    }

    /// Connections that were cut.
    pub(crate) fn cuts(&self) -> usize {
        self.cuts.load(Relaxed)
    }

    /// Connections that are open.
    pub(crate) fn open(&self) -> usize {
        self.open.load(Relaxed)
    }

    async fn of(engine: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Self {
            address: listener.local_addr().unwrap(),
            engine,
            cut: Arc::new(Mutex::new(Cut::None)),
            cuts: Arc::default(),
            open: Arc::default(),
        };
        let served = proxy.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let proxy = served.clone();
                tokio::spawn(async move {
                    proxy.open.fetch_add(1, Relaxed);
                    // However it ends, both connections close.
                    let _ = proxy.carry(stream).await;
                    proxy.open.fetch_sub(1, Relaxed);
                });
            }
        });
        proxy
    }

    async fn carry(&self, mut router: TcpStream) -> std::io::Result<()> {
        let mut engine = TcpStream::connect(self.engine).await?;
        let (mut asked, mut answered) = (vec![0; 64 << 10], vec![0; 64 << 10]);
        let mut is_used = false;
        loop {
            tokio::select! {
                read = router.read(&mut asked) => {
                    let bytes = &asked[..read?];
                    // The router writes the head of a request at once.
                    let is_post = bytes.starts_with(b"POST ");
                    let is_cut = match *self.cut.lock() {
                        Cut::None => false,
                        Cut::All => is_post,
                        Cut::KeptAlive => is_post && is_used,
                    };
                    if is_cut {
                        self.cuts.fetch_add(1, Relaxed);
                    }
                    if is_cut || bytes.is_empty() {
                        return Ok(());
                    }
                    is_used = true;
                    engine.write_all(bytes).await?;
                }
                read = engine.read(&mut answered) => {
                    let bytes = &answered[..read?];
                    if bytes.is_empty() {
                        return Ok(());
                    }
                    router.write_all(bytes).await?;
                }
            }
        }
    }
}
