//! x
use super::result::Report;
pub(super) fn svg(_report: &Report, _caption: &str) -> String {
    String::new()
}
