//! Discovery of the workers that the configuration lists.

use super::Discovery;
use crate::fleet::Member;

/// Lists its members once; they never change.
#[derive(Debug)]
pub struct StaticList(Option<Vec<Member>>);

impl StaticList {
    pub fn new(members: Vec<Member>) -> Self {
        Self(Some(members))
    }
}

impl Discovery for StaticList {
    fn name(&self) -> &str {
        "static"
    }

    async fn next(&mut self) -> Result<Vec<Member>, String> {
        match self.0.take() {
            Some(members) => Ok(members),
            None => std::future::pending().await,
        }
    }
}
