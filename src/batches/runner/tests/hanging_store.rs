//! A storage that hangs, as a mounted folder does whose server is gone.

use std::fmt::{Display, Formatter, Result as FmtResult};
use std::pin::Pin;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::task::{Context, Poll};

use futures_core::Stream;
use futures_core::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use tokio::sync::watch;

type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// A storage in memory, of which nothing can be read while it hangs.
#[derive(Debug, Default)]
pub(super) struct HangingStore {
    inner: InMemory,
    hangs: watch::Sender<bool>,
    deletions_hang: AtomicBool,
    /// The next write fails.
    write_fails: AtomicBool,
    reads: AtomicU32,
}

/// A deletion that never ends.
struct Endless;

impl Stream for Endless {
    type Item = Result<Path>;

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Pending
    }
}

impl HangingStore {
    pub(super) fn hang(&self, hangs: bool) {
        self.hangs.send_replace(hangs);
    }

    pub(super) fn hang_deletions(&self) {
        self.deletions_hang.store(true, Relaxed);
    }

    pub(super) fn fail_next_write(&self) {
        self.write_fails.store(true, Relaxed);
    }

    /// Whether a write that was to fail has done so.
    pub(super) fn has_failed(&self) -> bool {
        !self.write_fails.load(Relaxed)
    }

    /// How often it was to be read.
    pub(super) fn reads(&self) -> u32 {
        self.reads.load(Relaxed)
    }
}

impl Display for HangingStore {
    fn fmt(&self, f: &mut Formatter<'_>) -> FmtResult {
        f.write_str("a storage that hangs")
    }
}

// As the macro `async_trait` writes it.
impl ObjectStore for HangingStore {
    fn put_opts<'life0, 'life1, 'async_trait>(
        &'life0 self,
        location: &'life1 Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Answer<'async_trait, PutResult>
    where
        'life0: 'async_trait,
        'life1: 'async_trait,
        Self: 'async_trait,
    {
        if self.write_fails.swap(false, Relaxed) {
            let error = Error::Generic {
                store: "test",
                source: "it fails once".into(),
            };
            return Box::pin(std::future::ready(Err(error)));
        }
        self.inner.put_opts(location, payload, opts)
    }

    fn put_multipart_opts<'life0, 'life1, 'async_trait>(
        &'life0 self,
        location: &'life1 Path,
        opts: PutMultipartOptions,
    ) -> Answer<'async_trait, Box<dyn MultipartUpload>>
    where
        'life0: 'async_trait,
        'life1: 'async_trait,
        Self: 'async_trait,
    {
        self.inner.put_multipart_opts(location, opts)
    }

    fn get_opts<'life0, 'life1, 'async_trait>(
        &'life0 self,
        location: &'life1 Path,
        options: GetOptions,
    ) -> Answer<'async_trait, GetResult>
    where
        'life0: 'async_trait,
        'life1: 'async_trait,
        Self: 'async_trait,
    {
        self.reads.fetch_add(1, Relaxed);
        let mut hangs = self.hangs.subscribe();
        Box::pin(async move {
            // The sender lives as long as this storage.
            drop(hangs.wait_for(|hangs| !hangs).await);
            self.inner.get_opts(location, options).await
        })
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        if self.deletions_hang.load(Relaxed) {
            return Box::pin(Endless);
        }
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    fn list_with_delimiter<'life0, 'life1, 'async_trait>(
        &'life0 self,
        prefix: Option<&'life1 Path>,
    ) -> Answer<'async_trait, ListResult>
    where
        'life0: 'async_trait,
        'life1: 'async_trait,
        Self: 'async_trait,
    {
        self.inner.list_with_delimiter(prefix)
    }

    fn copy_opts<'life0, 'life1, 'life2, 'async_trait>(
        &'life0 self,
        from: &'life1 Path,
        to: &'life2 Path,
        options: CopyOptions,
    ) -> Answer<'async_trait, ()>
    where
        'life0: 'async_trait,
        'life1: 'async_trait,
        'life2: 'async_trait,
        Self: 'async_trait,
    {
        self.inner.copy_opts(from, to, options)
    }
}
