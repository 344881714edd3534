mod answers;
mod calls;
mod dialects;
mod messages;
mod properties;
