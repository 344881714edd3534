//! The future that an operation of a store returns.

use std::pin::Pin;

use super::error::Error;

/// The future that an operation returns. It may be polled on any tokio runtime of the process, but must stay
/// on the I/O thread that polled it first.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;
