//! The queries of lists of batches: OpenAI's and Anthropic's. Pure.

use crate::openai::error::ApiError;
use crate::store::conversation::Order;

/// OpenAI's and Anthropic's defaults.
const LIMIT_DEFAULT: usize = 20;
const LIMIT_MAX: usize = 100;
const MESSAGES_LIMIT_MAX: usize = 1_000;

/// Which batches a client wants, the newest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BatchQuery {
    pub(super) limit: usize,
    /// The batch from which the page is counted.
    pub(super) from: Option<String>,
    /// The parameter that named it.
    pub(super) param: &'static str,
    /// `OldestFirst`: the batches that are newer than that one, nearest first.
    pub(super) order: Order,
}

impl BatchQuery {
    /// `after` and `limit`. Parameters that are not known are ignored.
    pub(super) fn of_openai(query: &str) -> Result<Self, ApiError> {
        let mut read = Self::first("after");
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "after" if !value.is_empty() => read.from = Some(value.into_owned()),
                "limit" => read.limit = limit(&value, LIMIT_MAX)?,
                _ => {}
            }
        }
        Ok(read)
    }

    /// `after_id`, `before_id` and `limit`.
    pub(super) fn of_messages(query: &str) -> Result<Self, ApiError> {
        let mut read = Self::first("after_id");
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            let is_cursor = matches!(&*name, "after_id" | "before_id") && !value.is_empty();
            if is_cursor && read.from.is_some() {
                return Err(ApiError::mutually_exclusive("before_id", "after_id"));
            }
            match &*name {
                "after_id" if is_cursor => read.from = Some(value.into_owned()),
                "before_id" if is_cursor => {
                    read.from = Some(value.into_owned());
                    read.param = "before_id";
                    read.order = Order::OldestFirst;
                }
                "limit" => read.limit = limit(&value, MESSAGES_LIMIT_MAX)?,
                _ => {}
            }
        }
        Ok(read)
    }

    fn first(param: &'static str) -> Self {
        Self {
            limit: LIMIT_DEFAULT,
            from: None,
            param,
            order: Order::NewestFirst,
        }
    }

    /// There is no such batch.
    pub(super) fn unknown(&self) -> ApiError {
        let from = self.from.as_deref().unwrap_or_default();
        let why = format!("'{from}' is not an item of this list");
        ApiError::wrong_value(self.param, why)
    }
}

fn limit(text: &str, max: usize) -> Result<usize, ApiError> {
    let limit = text.parse::<usize>().ok();
    let limit = limit.filter(|limit| (1..=max).contains(limit));
    limit.ok_or_else(|| ApiError::wrong_value("limit", format!("it must be from 1 to {max}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_apis_page_by_twenty_unless_they_are_asked_for_more() {
        let read = BatchQuery::of_openai("").unwrap();
        assert_eq!(
            (read.limit, read.from, read.order),
            (20, None, Order::NewestFirst)
        );
        let read = BatchQuery::of_openai("limit=100&after=batch_1&x=y").unwrap();
        assert_eq!((read.limit, read.from.as_deref()), (100, Some("batch_1")));
        let read = BatchQuery::of_messages("limit=1000&before_id=a").unwrap();
        assert_eq!((read.limit, read.order), (1_000, Order::OldestFirst));
        assert_eq!((read.from.as_deref(), read.param), (Some("a"), "before_id"));
        let read = BatchQuery::of_messages("after_id=b&before_id=").unwrap();
        assert_eq!((read.from.as_deref(), read.param), (Some("b"), "after_id"));
    }

    #[test]
    fn a_wrong_parameter_is_named() {
        for query in ["limit=0", "limit=101", "limit=x", "limit="] {
            let error = BatchQuery::of_openai(query).unwrap_err();
            assert_eq!(error.param_or_empty(), "limit", "{query}");
        }
        let both = BatchQuery::of_messages("after_id=a&before_id=b").unwrap_err();
        assert_eq!(both.param_or_empty(), "before_id");
        assert_eq!(
            BatchQuery::of_openai("after=x")
                .unwrap()
                .unknown()
                .param_or_empty(),
            "after"
        );
    }
}
