mod answers;
mod calls;
mod messages;
mod properties;
