//! Workers that the configuration lists.

use super::Discovery;
use crate::fleet::Member;

/// Lists its members once and never changes.
#[derive(Debug)]
pub struct Fixed(Option<Vec<Member>>);

impl Fixed {
    pub fn new(members: Vec<Member>) -> Self {
        Self(Some(members))
    }
}

impl Discovery for Fixed {
    fn name(&self) -> &'static str {
        "fixed"
    }

    async fn next(&mut self) -> Result<Vec<Member>, String> {
        match self.0.take() {
            Some(members) => Ok(members),
            None => std::future::pending().await,
        }
    }
}
