//! A server that speaks as much of S3 as `object_store` needs for batches: one bucket, in memory.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_RANGE, ETAG, HeaderName, IF_NONE_MATCH, RANGE};
use hyper::http::request::Parts;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use object_store::aws::AmazonS3Builder;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::time::sleep;

use crate::batches::settings::S3Settings;
use crate::batches::storage::writer::MAX_S3_PARTS;
use crate::batches::storage::{Storage, s3};
use crate::http::drain::Tasks;
use crate::http::tls;

/// The smallest part of an upload that others follow.
const MIN_PART_BYTES: usize = 5 << 20;

/// Objects on one page of a list. S3 has 1,000.
const PAGE: usize = 2;

type Answer = Response<Full<Bytes>>;

/// What the server does to the next requests.
#[derive(Clone, Debug, Default)]
pub(super) struct S3Faults {
    /// This many requests are answered with 503.
    pub(super) slow_downs: u32,
    /// This many requests are answered with 400.
    pub(super) refusals: u32,
    /// Of this many PUTs the connection is closed when a piece of the body has come.
    pub(super) cuts: u32,
    /// Each answer comes this much later.
    pub(super) delay: Duration,
}

/// The server, which ends with the runtime of its test. A clone is the same one.
#[derive(Clone)]
pub(super) struct FakeS3 {
    address: SocketAddr,
    bucket: Arc<Mutex<Bucket>>,
}

#[derive(Default)]
struct Bucket {
    objects: BTreeMap<String, StoredObject>,
    /// The parts of each upload that is neither complete nor aborted, by number.
    uploads: BTreeMap<String, BTreeMap<String, StoredObject>>,
    /// How many names were given to uploads and versions.
    names: u32,
    faults: S3Faults,
}

/// An object, or a part of one.
struct StoredObject {
    etag: String,
    content: Bytes,
}

impl FakeS3 {
    #[expect(
        clippy::disallowed_methods,
        reason = "a server of a test dies with its runtime"
    )]
    pub(super) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Self {
            address: listener.local_addr().unwrap(),
            bucket: Arc::default(),
        };
        let accepting = server.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let server = accepting.clone();
                let service = service_fn(move |request: Request<Incoming>| {
                    let server = server.clone();
                    async move { server.answer(request).await }
                });
                let http = http1::Builder::new();
                tokio::spawn(http.serve_connection(TokioIo::new(stream), service));
            }
        });
        server
    }

    /// A storage in its bucket, below a prefix.
    pub(super) fn open(&self, tasks: &Tasks) -> Storage {
        let settings = S3Settings {
            bucket: "bucket".to_owned(),
            prefix: "router/prod".to_owned(),
            endpoint: format!("http://{}", self.address),
            allow_http: true,
            ..S3Settings::default()
        };
        let credentials = AmazonS3Builder::new()
            .with_access_key_id("id")
            .with_secret_access_key("secret");
        let store = s3::open_with(credentials, &settings, &tls::Clients::default());
        Storage {
            store: store.unwrap(),
            tasks: tasks.clone(),
            max_parts: MAX_S3_PARTS,
        }
    }

    pub(super) fn set_faults(&self, faults: S3Faults) {
        self.bucket.lock().faults = faults;
    }

    /// The faults, less those that have struck.
    pub(super) fn faults(&self) -> S3Faults {
        self.bucket.lock().faults.clone()
    }

    /// Uploads that are neither complete nor aborted.
    pub(super) fn uploads(&self) -> usize {
        self.bucket.lock().uploads.len()
    }

    /// An error closes the connection.
    async fn answer(&self, request: Request<Incoming>) -> io::Result<Answer> {
        let (head, mut body) = request.into_parts();
        sleep(self.faults().delay).await;
        if head.method == Method::PUT && self.strikes(|faults| &mut faults.cuts) {
            let _ = body.frame().await;
            return Err(io::Error::other("cut"));
        }
        let content = body.collect().await.map_err(io::Error::other)?.to_bytes();
        if self.strikes(|faults| &mut faults.slow_downs) {
            return Ok(failed(503, "SlowDown"));
        }
        if self.strikes(|faults| &mut faults.refusals) {
            return Ok(failed(400, "InvalidPart"));
        }
        Ok(self.bucket.lock().answer(&head, content))
    }

    /// Whether a fault strikes, which it then does one time less.
    fn strikes(&self, fault: fn(&mut S3Faults) -> &mut u32) -> bool {
        let mut bucket = self.bucket.lock();
        let left = fault(&mut bucket.faults);
        let strikes = *left > 0;
        *left = left.saturating_sub(1);
        strikes
    }
}

impl Bucket {
    fn answer(&mut self, head: &Parts, content: Bytes) -> Answer {
        let authorization = header(head, AUTHORIZATION).unwrap_or_default();
        if !authorization.starts_with("AWS4-HMAC-SHA256 ") {
            return failed(403, "AccessDenied");
        }
        let Some(key) = head.uri.path().strip_prefix("/bucket") else {
            return failed(404, "NoSuchBucket");
        };
        let key = key.trim_start_matches('/');
        let text = head.uri.query().unwrap_or_default();
        let query: BTreeMap<_, _> = form_urlencoded::parse(text.as_bytes()).collect();
        let value = |name: &str| query.get(name).map(|value| &**value);
        match (head.method.as_str(), value("uploadId")) {
            ("GET", None) if key.is_empty() => {
                let after = value("continuation-token").unwrap_or_default();
                self.list(value("prefix").unwrap_or_default(), after)
            }
            ("GET" | "HEAD", None) => self.get(key, head),
            ("PUT", None) => self.put(key, head, content),
            ("PUT", Some(upload)) => {
                let number = value("partNumber").unwrap_or_default();
                self.put_part(upload, number, content)
            }
            ("POST", None) if value("delete").is_some() => self.delete_all(&content),
            ("POST", None) if value("uploads").is_some() => self.begin_upload(),
            ("POST", Some(upload)) => self.complete(key, upload, &content),
            ("DELETE", Some(upload)) => {
                self.uploads.remove(upload);
                reply(204, "")
            }
            _ => failed(501, "NotImplemented"),
        }
    }

    /// The objects after one, a page of them.
    fn list(&self, prefix: &str, after: &str) -> Answer {
        let all = self.objects.iter();
        let found = all.filter(|(key, _)| key.starts_with(prefix) && key.as_str() > after);
        let page: Vec<_> = found.take(PAGE + 1).collect();
        let mut list = String::new();
        for (key, StoredObject { etag, content }) in page.iter().take(PAGE) {
            let size = content.len();
            list += &format!(
                "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>\
                 <ETag>{etag}</ETag><Size>{size}</Size></Contents>"
            );
        }
        if page.len() > PAGE {
            let (last, _) = page[PAGE - 1];
            list += &element("NextContinuationToken", last);
        }
        reply(200, element("ListBucketResult", &list))
    }

    fn get(&self, key: &str, head: &Parts) -> Answer {
        let Some(StoredObject { etag, content }) = self.objects.get(key) else {
            return failed(404, "NoSuchKey");
        };
        let answer = Response::builder().header(ETAG, etag);
        let Some(range) = header(head, RANGE) else {
            return answer.body(Full::new(content.clone())).unwrap();
        };
        let size = content.len();
        let bounds = range.strip_prefix("bytes=").unwrap();
        let (from, to) = bounds.split_once('-').unwrap();
        let (first, last): (usize, usize) = (from.parse().unwrap(), to.parse().unwrap());
        if size <= first {
            return failed(416, "InvalidRange");
        }
        let end = size.min(last + 1);
        let sent = format!("bytes {first}-{}/{size}", end - 1);
        let answer = answer.status(206).header(CONTENT_RANGE, sent);
        answer.body(Full::new(content.slice(first..end))).unwrap()
    }

    fn put(&mut self, key: &str, head: &Parts, content: Bytes) -> Answer {
        if header(head, IF_NONE_MATCH).is_some() && self.objects.contains_key(key) {
            return failed(412, "PreconditionFailed");
        }
        let object = self.new_object(content);
        let answer = stored(&object);
        self.objects.insert(key.to_owned(), object);
        answer
    }

    fn delete_all(&mut self, request: &[u8]) -> Answer {
        let mut deleted = String::new();
        for key in texts(request, "Key") {
            self.objects.remove(key);
            deleted += &element("Deleted", &element("Key", key));
        }
        reply(200, element("DeleteResult", &deleted))
    }

    fn begin_upload(&mut self) -> Answer {
        let name = self.new_name();
        let id = element("UploadId", &name);
        self.uploads.insert(name, BTreeMap::new());
        reply(200, element("InitiateMultipartUploadResult", &id))
    }

    fn put_part(&mut self, upload: &str, number: &str, content: Bytes) -> Answer {
        let part = self.new_object(content);
        let Some(parts) = self.uploads.get_mut(upload) else {
            return failed(404, "NoSuchUpload");
        };
        let answer = stored(&part);
        parts.insert(number.to_owned(), part);
        answer
    }

    /// Makes an object of those parts that the request lists.
    fn complete(&mut self, key: &str, upload: &str, request: &[u8]) -> Answer {
        let Some(parts) = self.uploads.get(upload) else {
            return failed(404, "NoSuchUpload");
        };
        let (numbers, etags) = (texts(request, "PartNumber"), texts(request, "ETag"));
        let mut whole = BytesMut::new();
        for (at, (number, etag)) in numbers.iter().zip(etags).enumerate() {
            let Some(part) = parts.get(*number).filter(|part| part.etag == etag) else {
                return failed(400, "InvalidPart");
            };
            if part.content.len() < MIN_PART_BYTES && at + 1 < numbers.len() {
                return failed(400, "EntityTooSmall");
            }
            whole.extend_from_slice(&part.content);
        }
        self.uploads.remove(upload);
        let object = self.new_object(whole.freeze());
        let etag = element("ETag", &object.etag);
        self.objects.insert(key.to_owned(), object);
        reply(200, element("CompleteMultipartUploadResult", &etag))
    }

    fn new_object(&mut self, content: Bytes) -> StoredObject {
        StoredObject {
            etag: self.new_name(),
            content,
        }
    }

    fn new_name(&mut self) -> String {
        self.names += 1;
        format!("name-{}", self.names)
    }
}

fn reply(status: u16, body: impl Into<Bytes>) -> Answer {
    let answer = Response::builder().status(status);
    answer.body(Full::new(body.into())).unwrap()
}

fn failed(status: u16, code: &str) -> Answer {
    reply(status, element("Error", &element("Code", code)))
}

/// The answer to a write.
fn stored(object: &StoredObject) -> Answer {
    let answer = Response::builder().header(ETAG, &object.etag);
    answer.body(Full::default()).unwrap()
}

fn header(head: &Parts, name: HeaderName) -> Option<&str> {
    head.headers.get(name)?.to_str().ok()
}

/// What is in it has nothing that XML escapes.
fn element(name: &str, content: &str) -> String {
    format!("<{name}>{content}</{name}>")
}

/// The texts of the elements of this name.
fn texts<'a>(xml: &'a [u8], name: &str) -> Vec<&'a str> {
    let (begin, end) = (format!("<{name}>"), format!("</{name}>"));
    let elements = std::str::from_utf8(xml).unwrap().split(&begin).skip(1);
    let text = |element: &'a str| element.split(&end).next().unwrap_or_default();
    elements.map(text).collect()
}
