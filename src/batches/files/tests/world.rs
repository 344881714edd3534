//! A service of files with a store and a storage of its own, and forms for it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::header::CONTENT_TYPE;
use hyper::{HeaderMap, Response};
use serde_json::Value;
use tokio::sync::mpsc;

use crate::batches::files::{FileUpload, Files};
use crate::batches::settings::Settings;
use crate::batches::storage::Storage;
use crate::http::drain::Tasks;
use crate::http::server::RequestBody;
use crate::http::{self, tls};
use crate::ids::Tenant;
use crate::observe::metrics::Registry;
use crate::openai::error::ApiError;
use crate::store::conversation::Order;
use crate::store::documents::{Collection, DocumentPage, Documents};
use crate::store::memory::Memory;
use crate::store::{ResponseStore, RetentionSettings};

pub(super) const TYPE: &str = "multipart/form-data; boundary=x1";
pub(super) const PURPOSE: (&str, &str) = ("name=\"purpose\"", "batch");
pub(super) const FILE: &str = "name=\"file\"; filename=\"in.jsonl\"";
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
pub(super) const END: &str = "--x1--\r\n";

/// A service of files with a store and a storage of its own.
pub(super) struct World {
    pub(super) files: Files,
    pub(super) storage: Storage,
    store: Arc<Memory>,
    pub(super) tasks: Tasks,
    metrics: Registry,
}

impl World {
    pub(super) fn new(settings: Settings) -> Self {
        let tasks = Tasks::default();
        let storage = if settings.is_on() {
            Storage::open(&settings, &tls::Clients::default(), &tasks).unwrap()
        } else {
            Storage::memory()
        };
        let metrics = Registry::default();
        let keep = RetentionSettings::default();
        let store = Arc::new(Memory::new(&Default::default(), &keep, &metrics));
        let shared: Arc<dyn ResponseStore> = store.clone();
        let files = Files::new(settings, shared, storage.clone(), tasks.clone(), &metrics);
        Self {
            files,
            storage,
            store,
            tasks,
            metrics,
        }
    }

    pub(super) async fn upload(&self, form: &[u8], piece: usize) -> Result<Value, ApiError> {
        self.upload_as(Tenant::default(), TYPE, form, piece).await
    }

    pub(super) async fn upload_as(
        &self,
        tenant: Tenant,
        content_type: &str,
        form: &[u8],
        piece: usize,
    ) -> Result<Value, ApiError> {
        let (sender, piped) = mpsc::channel(1);
        let feed = async move {
            for piece in form.chunks(piece) {
                if sender.send(Bytes::copy_from_slice(piece)).await.is_err() {
                    return;
                }
            }
        };
        let headers = headers(content_type);
        let upload = FileUpload {
            headers: &headers,
            body: RequestBody::from(piped),
            timeout: PATIENCE,
        };
        let (answer, ()) = tokio::join!(self.files.create(tenant, upload), feed);
        Ok(object(answer?).await)
    }

    pub(super) async fn list(&self, query: &str) -> Value {
        object(self.files.list(Tenant::default(), query).await.unwrap()).await
    }

    /// The ids of all documents of the tenant, also of those that are no files.
    pub(super) async fn documents(&self) -> Vec<String> {
        // What was dropped just now is undone by tasks.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        let page = DocumentPage {
            after: None,
            limit: 100,
            order: Order::OldestFirst,
        };
        let tenant = Tenant::default();
        let found = self.store.documents(Collection::Files, tenant, page).await;
        let found = found.unwrap().documents.into_iter();
        found.map(|document| document.key.id).collect()
    }

    pub(super) async fn assert_empty(&self, why: &str) {
        assert_eq!(self.storage.list("").await.unwrap(), [""; 0], "{why}");
        assert_eq!(self.documents().await, [""; 0], "{why}");
    }

    pub(super) fn has_metric(&self, line: &str) -> bool {
        self.metrics.text().lines().any(|found| found == line)
    }
}

pub(super) fn headers(content_type: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, content_type.parse().unwrap());
    headers
}

pub(super) async fn bytes(answer: Response<http::Body>) -> Bytes {
    answer.into_body().collect().await.unwrap().to_bytes()
}

pub(super) async fn object(answer: Response<http::Body>) -> Value {
    serde_json::from_slice(&bytes(answer).await).unwrap()
}

pub(super) fn part((head, value): (&str, &[u8])) -> Vec<u8> {
    let mut part = format!("--x1\r\nContent-Disposition: form-data; {head}\r\n\r\n").into_bytes();
    part.extend_from_slice(value);
    part.extend_from_slice(b"\r\n");
    part
}

pub(super) fn form(parts: &[(&str, &str)]) -> Vec<u8> {
    let parts = parts.iter();
    let mut form: Vec<u8> = parts
        .flat_map(|&(head, value)| part((head, value.as_bytes())))
        .collect();
    form.extend_from_slice(END.as_bytes());
    form
}

/// A file as SDKs send it.
pub(super) fn with_file(content: &[u8]) -> Vec<u8> {
    let mut form = part((PURPOSE.0, PURPOSE.1.as_bytes()));
    form.extend_from_slice(&part((FILE, content)));
    form.extend_from_slice(END.as_bytes());
    form
}

/// All files below a folder, unfinished ones too.
pub(super) fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(files_below(&path));
        } else {
            files.push(path);
        }
    }
    files
}
