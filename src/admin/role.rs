//! What operators may do.

use crate::observe::metrics::words;

words! {
    /// What an operator may do. A later role may do all that an earlier one may.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub(super) enum Role: Display {
        /// See the router's state.
        Read = "read",
        /// Change something, and see something of prompts.
        Operate = "operate",
    }
}

impl Role {
    pub(super) fn token_settings(self) -> &'static str {
        match self {
            Self::Read => "`admin.tokens.read`, `admin.tokens.operate` or `admin.token`",
            Self::Operate => "`admin.tokens.operate` or `admin.token`",
        }
    }

    pub(super) fn name_settings(self) -> &'static str {
        match self {
            Self::Read => "`admin.client_names.read` or `admin.client_names.operate`",
            Self::Operate => "`admin.client_names.operate`",
        }
    }
}
