//! The queries of lists: OpenAI's of files and of batches, Anthropic's of batches. Pure.

use crate::openai::error::ApiError;
use crate::store::conversation::Order;

/// A list that a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListOf {
    Files,
    Batches,
    MessageBatches,
}

impl ListOf {
    /// The items of a page, by default and at most: those of the APIs.
    fn limits(self) -> (usize, usize) {
        match self {
            Self::Files => (10_000, 10_000),
            Self::Batches => (20, 100),
            Self::MessageBatches => (20, 1_000),
        }
    }
}

/// What a client wants of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ListQuery {
    pub(super) limit: usize,
    /// The item from which the page is counted.
    pub(super) from: Option<String>,
    /// The parameter that named it.
    param: &'static str,
    pub(super) order: Order,
    /// Only files of this purpose. One that no file has finds none.
    pub(super) purpose: Option<String>,
}

impl ListQuery {
    /// Parameters that are not known are ignored.
    pub(super) fn read(list: ListOf, query: &str) -> Result<Self, ApiError> {
        let (limit, max) = list.limits();
        let mut read = Self {
            limit,
            from: None,
            param: "after",
            order: Order::NewestFirst,
            purpose: None,
        };
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match (list, &*name) {
                (_, "limit") => read.limit = limit_of(&value, max)?,
                (ListOf::Files, "order") => read.order = order_of(&value)?,
                _ if value.is_empty() => {}
                (ListOf::Files, "purpose") => read.purpose = Some(value.into_owned()),
                (ListOf::Files | ListOf::Batches, "after") => read.from = Some(value.into_owned()),
                (ListOf::MessageBatches, "after_id" | "before_id") if read.from.is_some() => {
                    return Err(ApiError::mutually_exclusive("before_id", "after_id"));
                }
                (ListOf::MessageBatches, "after_id") => {
                    (read.from, read.param) = (Some(value.into_owned()), "after_id");
                }
                (ListOf::MessageBatches, "before_id") => {
                    (read.from, read.param) = (Some(value.into_owned()), "before_id");
                    // The batches that are newer than that one, nearest first.
                    read.order = Order::OldestFirst;
                }
                _ => {}
            }
        }
        Ok(read)
    }

    /// There is no such item.
    pub(super) fn unknown(&self) -> ApiError {
        let from = self.from.as_deref().unwrap_or_default();
        let why = format!("'{from}' is not an item of this list");
        ApiError::wrong_value(self.param, why)
    }
}

fn limit_of(text: &str, max: usize) -> Result<usize, ApiError> {
    let is_number = text.bytes().all(|digit| digit.is_ascii_digit());
    let limit = is_number.then(|| text.parse::<usize>().ok()).flatten();
    let limit = limit.filter(|limit| (1..=max).contains(limit));
    limit.ok_or_else(|| ApiError::wrong_value("limit", format!("it must be from 1 to {max}")))
}

fn order_of(text: &str) -> Result<Order, ApiError> {
    match text {
        "asc" => Ok(Order::OldestFirst),
        "desc" => Ok(Order::NewestFirst),
        _ => Err(ApiError::wrong_value("order", "it must be 'asc' or 'desc'")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_list_has_the_parameters_and_the_defaults_of_its_api() {
        let (newest, oldest) = (Order::NewestFirst, Order::OldestFirst);
        for (list, query, limit, from, order, purpose) in [
            (ListOf::Files, "", 10_000, None, newest, None),
            (
                ListOf::Files,
                "limit=2&order=asc&after=file-1&purpose=batch&x=y",
                2,
                Some("file-1"),
                oldest,
                Some("batch"),
            ),
            (ListOf::Batches, "order=asc", 20, None, newest, None),
            (
                ListOf::Batches,
                "limit=100&after=b",
                100,
                Some("b"),
                newest,
                None,
            ),
            (
                ListOf::MessageBatches,
                "limit=1000&before_id=a",
                1_000,
                Some("a"),
                oldest,
                None,
            ),
            (
                ListOf::MessageBatches,
                "after_id=b&before_id=",
                20,
                Some("b"),
                newest,
                None,
            ),
        ] {
            let read = ListQuery::read(list, query).unwrap();
            assert_eq!((read.limit, read.order), (limit, order), "{query}");
            assert_eq!(read.from.as_deref(), from, "{query}");
            assert_eq!(read.purpose.as_deref(), purpose, "{query}");
        }
    }

    #[test]
    fn a_wrong_parameter_is_named() {
        for (list, query, param) in [
            (ListOf::Files, "limit=0", "limit"),
            (ListOf::Files, "limit=10001", "limit"),
            (ListOf::Files, "order=up", "order"),
            (ListOf::Batches, "limit=101", "limit"),
            (ListOf::Batches, "limit=x", "limit"),
            (ListOf::Batches, "limit=%2B5", "limit"),
            (ListOf::Batches, "limit=", "limit"),
            (
                ListOf::MessageBatches,
                "after_id=a&before_id=b",
                "before_id",
            ),
        ] {
            let error = ListQuery::read(list, query).unwrap_err();
            assert_eq!(error.param_or_empty(), param, "{query}");
        }
        for (list, param) in [
            (ListOf::Batches, "after"),
            (ListOf::MessageBatches, "before_id"),
        ] {
            let read = ListQuery::read(list, &format!("{param}=x")).unwrap();
            assert_eq!(read.unknown().param_or_empty(), param);
        }
    }
}
