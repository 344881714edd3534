//! The body of a request: JSON, or the form that uploads a file, which is read while it is sent.

use std::fs::File;
use std::io::{self, Cursor, Read};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use indicatif::ProgressBar;
use serde_json::Value;

/// What is read of a file at a time.
const PIECE_BYTES: u64 = 256 << 10;

/// A body of a known length. It reads without leaving the thread: the command has nothing else to do.
pub(super) struct SentBody {
    pub(super) content_type: String,
    content: Box<dyn Read + Send>,
    /// Bytes that are not read yet.
    left: u64,
}

impl SentBody {
    pub(super) fn empty() -> Self {
        Self::of_bytes(Vec::new())
    }

    pub(super) fn json(value: &Value) -> Self {
        Self::of_bytes(value.to_string().into_bytes())
    }

    fn of_bytes(bytes: Vec<u8>) -> Self {
        Self {
            content_type: "application/json".to_owned(),
            left: bytes.len() as u64,
            content: Box::new(Cursor::new(bytes)),
        }
    }

    /// A form with the purpose `batch` and the next `length` bytes of a file. `random` keeps the boundary out of the
    /// file. The bar goes on with what is read.
    pub(super) fn form(
        file: File,
        length: u64,
        name: &str,
        random: u128,
        bar: &ProgressBar,
    ) -> Self {
        let name = name.replace('"', "%22");
        let name = name.replace('\r', "%0D").replace('\n', "%0A");
        let boundary = format!("warmroute-{random:032x}");
        let head = format!(
            "--{boundary}\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
             --{boundary}\r\ncontent-disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\
             content-type: application/jsonl\r\n\r\n"
        );
        let tail = format!("\r\n--{boundary}--\r\n");
        let around = (head.len() + tail.len()) as u64;
        let content = Cursor::new(head)
            .chain(bar.wrap_read(file.take(length)))
            .chain(Cursor::new(tail));
        Self {
            content_type: format!("multipart/form-data; boundary={boundary}"),
            content: Box::new(content),
            left: around + length,
        }
    }
}

impl Body for SentBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let body = self.get_mut();
        if body.left == 0 {
            return Poll::Ready(None);
        }
        let mut piece = Vec::new();
        let mut next = body.content.by_ref().take(body.left.min(PIECE_BYTES));
        Poll::Ready(Some(match next.read_to_end(&mut piece) {
            Err(error) => Err(error),
            Ok(0) => Err(io::Error::other(
                "the input became shorter while it was sent",
            )),
            Ok(length) => {
                body.left -= length as u64;
                Ok(Frame::data(piece.into()))
            }
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};
    use std::task::Waker;

    use super::*;

    /// A form for a file with this content, of which so many bytes were announced.
    fn form(content: &[u8], length: u64, name: &str) -> SentBody {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        file.rewind().unwrap();
        SentBody::form(file, length, name, 7, &ProgressBar::hidden())
    }

    fn whole(mut body: SentBody) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut context = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(frame)) = Pin::new(&mut body).poll_frame(&mut context) {
            bytes.extend_from_slice(&frame?.into_data().unwrap());
        }
        Ok(bytes)
    }

    #[test]
    fn a_form_has_the_length_that_it_announces_and_the_bytes_of_the_file() {
        for length in [0, 1, 256 << 10, (3 << 18) + 7] {
            let content = vec![b'x'; length];
            let body = form(&content, length as u64, "in.jsonl");
            let announced = body.size_hint().exact().unwrap();
            let bytes = whole(body).unwrap();
            assert_eq!(bytes.len() as u64, announced);
            let begin = bytes.len() - length - "\r\n----\r\n".len() - 42;
            assert_eq!(&bytes[begin..begin + length], content);
        }
    }

    #[test]
    fn a_file_that_became_shorter_is_an_error_and_not_a_short_form() {
        let error = whole(form(b"four", 5, "in.jsonl")).unwrap_err();
        assert!(error.to_string().contains("shorter"), "{error}");
    }

    #[test]
    fn a_name_ends_no_header() {
        let head = String::from_utf8(whole(form(b"", 0, "a\"\r\nb")).unwrap()).unwrap();
        assert!(head.contains("filename=\"a%22%0D%0Ab\"\r\n"), "{head}");
    }
}
