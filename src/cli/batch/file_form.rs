//! The form that uploads a file: `multipart/form-data`, read from the file while it is sent.

use std::fs::File;
use std::io::{self, Read};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

/// What is read of the file at a time.
const PIECE_BYTES: u64 = 256 << 10;

/// A form with the purpose `batch` and a file. It reads the file without leaving the thread: the command has nothing
/// else to do.
#[derive(Debug)]
pub(super) struct FileForm {
    boundary: String,
    head: Bytes,
    file: File,
    /// Bytes of the file that are not read yet.
    left: u64,
    tail: Bytes,
    sent: Arc<AtomicU64>,
}

impl FileForm {
    /// A form with the next `length` bytes of a file. `random` keeps the boundary out of the file.
    pub(super) fn new(file: File, length: u64, name: &str, random: u128) -> Self {
        let boundary = format!("warmroute-{random:032x}");
        let name = escaped(name);
        let head = format!(
            "--{boundary}\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
             --{boundary}\r\ncontent-disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\
             content-type: application/jsonl\r\n\r\n"
        );
        Self {
            head: head.into(),
            file,
            left: length,
            tail: format!("\r\n--{boundary}--\r\n").into(),
            sent: Arc::default(),
            boundary,
        }
    }

    pub(super) fn content_type(&self) -> String {
        format!("multipart/form-data; boundary={}", self.boundary)
    }

    /// Bytes of the file that the connection has taken.
    pub(super) fn sent(&self) -> Arc<AtomicU64> {
        self.sent.clone()
    }

    fn next_piece(&mut self) -> io::Result<Option<Bytes>> {
        if !self.head.is_empty() {
            return Ok(Some(std::mem::take(&mut self.head)));
        }
        if self.left > 0 {
            let mut piece = vec![0; self.left.min(PIECE_BYTES) as usize];
            let length = self.file.read(&mut piece)?;
            if length == 0 {
                let why = "the input became shorter while it was sent";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why));
            }
            piece.truncate(length);
            self.left -= length as u64;
            self.sent.fetch_add(length as u64, Ordering::Relaxed);
            return Ok(Some(piece.into()));
        }
        let tail = std::mem::take(&mut self.tail);
        Ok((!tail.is_empty()).then_some(tail))
    }
}

impl Body for FileForm {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let piece = self.get_mut().next_piece().transpose();
        Poll::Ready(piece.map(|piece| piece.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.head.is_empty() && self.left == 0 && self.tail.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        let around = self.head.len() + self.tail.len();
        SizeHint::with_exact(around as u64 + self.left)
    }
}

/// A file's name as forms write it.
fn escaped(name: &str) -> String {
    let name = name.replace('"', "%22");
    name.replace('\r', "%0D").replace('\n', "%0A")
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;

    fn file(content: &[u8]) -> File {
        let path = std::env::temp_dir().join(format!("warmroute-form-{}", fastrand::u64(..)));
        let mut file = File::options()
            .create_new(true)
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        std::fs::remove_file(path).unwrap();
        file.write_all(content).unwrap();
        file.rewind().unwrap();
        file
    }

    fn whole(mut form: FileForm) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while let Some(piece) = form.next_piece()? {
            bytes.extend_from_slice(&piece);
        }
        assert!(form.is_end_stream());
        Ok(bytes)
    }

    #[test]
    fn a_form_has_the_length_that_it_announces_and_the_bytes_of_the_file() {
        for length in [0, 1, PIECE_BYTES as usize, 3 * PIECE_BYTES as usize + 7] {
            let content: Vec<u8> = (0..length).map(|at| at as u8).collect();
            let form = FileForm::new(file(&content), length as u64, "in.jsonl", 7);
            let announced = form.size_hint().exact().unwrap();
            let sent = form.sent();
            let bytes = whole(form).unwrap();
            assert_eq!(bytes.len() as u64, announced);
            assert_eq!(sent.load(Ordering::Relaxed), length as u64);
            let begin = bytes.len() - content.len() - "\r\n----\r\n".len() - 42;
            assert_eq!(&bytes[begin..begin + length], content);
        }
    }

    #[test]
    fn a_file_that_became_shorter_is_an_error_and_not_a_short_form() {
        let error = whole(FileForm::new(file(b"four"), 5, "in.jsonl", 7)).unwrap_err();
        assert!(error.to_string().contains("shorter"), "{error}");
    }

    #[test]
    fn a_name_ends_no_header() {
        let form = FileForm::new(file(b""), 0, "a\"\r\nb", 7);
        let head = String::from_utf8(whole(form).unwrap()).unwrap();
        assert!(head.contains("filename=\"a%22%0D%0Ab\"\r\n"), "{head}");
    }
}
