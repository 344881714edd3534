//! The query of a list of files. Pure.

use crate::openai::error::ApiError;
use crate::store::conversation::Order;

/// OpenAI's default and maximum.
const LIMIT_MAX: usize = 10_000;

/// What a client wants of its files.
#[derive(Debug, PartialEq)]
pub(super) struct FileQuery {
    pub(super) after: Option<String>,
    pub(super) limit: usize,
    pub(super) order: Order,
    /// Only files of this purpose. One that no file has finds none.
    pub(super) purpose: Option<String>,
}

impl FileQuery {
    /// Parameters that are not known are ignored.
    pub(super) fn read(query: &str) -> Result<Self, ApiError> {
        let mut read = Self {
            after: None,
            limit: LIMIT_MAX,
            order: Order::NewestFirst,
            purpose: None,
        };
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "after" if !value.is_empty() => read.after = Some(value.into_owned()),
                "purpose" if !value.is_empty() => read.purpose = Some(value.into_owned()),
                "limit" => {
                    let limit = value.parse().ok();
                    let limit = limit.filter(|limit| (1..=LIMIT_MAX).contains(limit));
                    read.limit = limit.ok_or_else(|| {
                        ApiError::wrong_value("limit", format!("it must be from 1 to {LIMIT_MAX}"))
                    })?;
                }
                "order" => {
                    read.order = match &*value {
                        "asc" => Order::OldestFirst,
                        "desc" => Order::NewestFirst,
                        _ => {
                            let why = "it must be 'asc' or 'desc'";
                            return Err(ApiError::wrong_value("order", why));
                        }
                    };
                }
                _ => {}
            }
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_has_openais_defaults() {
        let read = FileQuery::read("").unwrap();
        assert_eq!(
            (read.limit, read.order, read.after, read.purpose),
            (10_000, Order::NewestFirst, None, None)
        );
        let read = FileQuery::read("limit=2&order=asc&after=file-1&purpose=batch&x=y").unwrap();
        assert_eq!(
            (read.limit, read.order, read.after, read.purpose),
            (
                2,
                Order::OldestFirst,
                Some("file-1".to_owned()),
                Some("batch".to_owned())
            )
        );
    }

    #[test]
    fn a_wrong_parameter_is_named() {
        for (query, param) in [
            ("limit=0", "limit"),
            ("limit=10001", "limit"),
            ("limit=-1", "limit"),
            ("order=up", "order"),
        ] {
            let error = FileQuery::read(query).unwrap_err();
            assert_eq!(
                (error.code, error.param_or_empty()),
                ("invalid_value", param)
            );
        }
    }
}
