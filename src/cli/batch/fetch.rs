//! Brings a file of the router to its place, which has the whole file or what it had before.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use http_body::Body;
use http_body_util::BodyExt;
use hyper::Method;
use hyper::body::Incoming;
use indicatif::ProgressBar;

use super::api::{ApiClient, AskError};
use super::places::part_of;
use super::sent_body::SentBody;

/// What has come of a file. It goes if no more comes.
struct PartialFile(PathBuf);

impl Drop for PartialFile {
    fn drop(&mut self) {
        // Nothing is there once the file is in its place.
        let _ = fs::remove_file(&self.0);
    }
}

/// Streams a file of the router to its place. Without a file the place gets an empty one.
pub(super) async fn fetch(
    client: &ApiClient,
    file_id: Option<&str>,
    place: &Path,
    bar: &ProgressBar,
) -> Result<(), AskError> {
    let local = |error: io::Error| AskError::local(format!("{}: {error}", place.display()));
    let part = PartialFile(part_of(place));
    let mut file = File::create(&part.0).map_err(local)?;
    if let Some(file_id) = file_id {
        let path = format!("/v1/files/{file_id}/content");
        let read = async |mut answer: Incoming| {
            bar.set_position(0);
            bar.set_length(answer.size_hint().exact().unwrap_or(0));
            while let Some(frame) = answer.frame().await {
                let frame = frame.map_err(|error| AskError::broken(&error))?;
                if let Ok(data) = frame.into_data() {
                    file.write_all(&data).map_err(local)?;
                    bar.inc(data.len() as u64);
                }
            }
            Ok::<(), AskError>(())
        };
        let body = SentBody::empty();
        client.exchange(Method::GET, &path, body, bar, read).await?;
    }
    file.sync_all().map_err(local)?;
    fs::rename(&part.0, place).map_err(local)
}
