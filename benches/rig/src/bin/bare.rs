//! The least that a proxy made of hyper does: reads a request's head, sends the request to the next worker over a
//! connection that is kept, and passes the answer on. No routing, no limits, no metrics, no deadlines, one thread.
//! Beside it, `compare.sh` shows what a router's own work takes.
use bytes::Bytes;
use clap::Parser;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1 as client;
use hyper::server::conn::http1 as server;
use hyper::service::service_fn;
use hyper::{Request, Response, header};
use hyper_util::rt::TokioIo;
use std::{
    cell::{Cell, RefCell},
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};
use tokio::net::{TcpListener, TcpStream};

#[derive(Parser)]
struct Args {
    #[arg(long, default_value = "127.0.0.1:8090")]
    listen: String,
    /// workers on ports 9100 and up
    #[arg(long, default_value_t = 4)]
    workers: usize,
}

type Sender = client::SendRequest<Incoming>;
type Error = Box<dyn std::error::Error + Send + Sync>;

struct Worker {
    address: String,
    host: header::HeaderValue,
    idle: RefCell<Vec<Sender>>,
}

/// An answer whose connection goes back to its worker's when it has ended.
struct Answer {
    body: Incoming,
    sender: Option<Sender>,
    worker: Rc<Worker>,
}
impl Body for Answer {
    type Data = Bytes;
    type Error = hyper::Error;
    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
impl Drop for Answer {
    fn drop(&mut self) {
        if let Some(sender) = self.sender.take().filter(|sender| !sender.is_closed()) {
            self.worker.idle.borrow_mut().push(sender);
        }
    }
}

async fn connection(worker: &Worker) -> Result<Sender, Error> {
    loop {
        let Some(mut sender) = worker.idle.borrow_mut().pop() else {
            break;
        };
        if sender.ready().await.is_ok() {
            return Ok(sender);
        }
    }
    let stream = TcpStream::connect(&worker.address).await?;
    stream.set_nodelay(true)?;
    let (sender, running) = client::handshake(TokioIo::new(stream)).await?;
    tokio::task::spawn_local(running);
    Ok(sender)
}

async fn forward(
    worker: Rc<Worker>,
    mut request: Request<Incoming>,
) -> Result<Response<Answer>, Error> {
    request
        .headers_mut()
        .insert(header::HOST, worker.host.clone());
    let mut sender = connection(&worker).await?;
    let answer = sender.send_request(request).await?;
    Ok(answer.map(|body| Answer {
        body,
        sender: Some(sender),
        worker,
    }))
}

fn main() -> Result<(), Error> {
    let args = Args::parse();
    let workers: Vec<Rc<Worker>> = (0..args.workers)
        .map(|k| format!("127.0.0.1:{}", 9100 + k))
        .map(|address| {
            Rc::new(Worker {
                host: header::HeaderValue::from_str(&address).unwrap(),
                address,
                idle: RefCell::default(),
            })
        })
        .collect();
    let workers = Rc::new(workers);
    let next = Rc::new(Cell::new(0));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    tokio::task::LocalSet::new().block_on(&runtime, async move {
        let listener = TcpListener::bind(&args.listen).await?;
        loop {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            let (workers, next) = (workers.clone(), next.clone());
            let service = service_fn(move |request| {
                next.set(next.get() + 1);
                forward(workers[next.get() % workers.len()].clone(), request)
            });
            tokio::task::spawn_local(async move {
                let _ = server::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    })
}
