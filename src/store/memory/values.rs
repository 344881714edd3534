//! The JSON values of one response.

use std::sync::Arc;

use bytes::Bytes;

use crate::store::record::Content;

/// Input, response and output in one allocation, so that no larger request buffer is kept alive.
#[derive(Clone, Debug)]
pub(super) struct Values {
    bytes: Arc<[u8]>,
    input_end: u32,
    response_end: u32,
}

impl Values {
    pub(super) fn new(input: &[u8], content: &Content) -> Self {
        let bytes = [input, &content.response, &content.output].concat();
        Self {
            bytes: bytes.into(),
            input_end: input.len() as u32,
            response_end: (input.len() + content.response.len()) as u32,
        }
    }

    fn all(&self) -> Bytes {
        Bytes::from_owner(self.bytes.clone())
    }

    pub(super) fn input(&self) -> Bytes {
        self.all().slice(..self.input_end as usize)
    }

    pub(super) fn output(&self) -> Bytes {
        self.all().slice(self.response_end as usize..)
    }

    pub(super) fn content(&self) -> Content {
        let response = self.input_end as usize..self.response_end as usize;
        Content {
            response: self.all().slice(response),
            output: self.output(),
        }
    }

    pub(super) fn replace(&mut self, content: &Content) {
        *self = Self::new(&self.bytes[..self.input_end as usize], content);
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Size of the input and output items, without the response object.
    pub(super) fn item_bytes(&self) -> u64 {
        let response = self.response_end - self.input_end;
        self.bytes.len() as u64 - u64::from(response)
    }
}
