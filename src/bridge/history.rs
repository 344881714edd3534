//! The last batches of one incarnation, encoded, by sequence number.

use std::collections::VecDeque;

use bytes::Bytes;

#[derive(Debug)]
pub struct History {
    /// Sequence number of the first message.
    first: u64,
    messages: VecDeque<Bytes>,
    bytes: usize,
    messages_max: usize,
    bytes_max: usize,
}

impl History {
    /// The first message will have number `first`.
    pub fn new(first: u64, messages_max: usize, bytes_max: usize) -> Self {
        Self {
            first,
            messages: VecDeque::new(),
            bytes: 0,
            messages_max,
            bytes_max,
        }
    }

    /// The oldest number in the history; the next number if the history is empty.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// The next batch's number.
    pub fn next(&self) -> u64 {
        self.first + self.messages.len() as u64
    }

    pub fn batches(&self) -> usize {
        self.messages.len()
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Appends a message, and drops the oldest ones beyond the bounds. The newest is always kept:
    /// subscribers verify with it that the process is the same.
    pub fn push(&mut self, message: Bytes) {
        self.bytes += message.len();
        self.messages.push_back(message);
        while self.messages.len() > 1
            && (self.messages.len() > self.messages_max || self.bytes > self.bytes_max)
        {
            let oldest = self.messages.pop_front();
            self.bytes -= oldest.map_or(0, |oldest| oldest.len());
            self.first += 1;
        }
    }

    pub fn get(&self, number: u64) -> Option<&Bytes> {
        let index = number.checked_sub(self.first)?;
        self.messages.get(usize::try_from(index).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_first_and_the_newest_stays() {
        let mut history = History::new(10, 3, 100);
        assert_eq!((history.first(), history.next()), (10, 10));
        for length in [10, 20, 30, 40] {
            history.push(vec![0; length].into());
        }
        assert_eq!((history.first(), history.next()), (11, 14));
        assert_eq!((history.batches(), history.bytes()), (3, 90));
        assert!(history.get(10).is_none() && history.get(14).is_none());
        assert_eq!(history.get(13).unwrap().len(), 40);
        history.push(vec![0; 1_000].into());
        assert_eq!((history.first(), history.next()), (14, 15));
        assert_eq!(history.bytes(), 1_000);
    }
}
