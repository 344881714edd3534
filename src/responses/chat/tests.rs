mod answers;
mod messages;
mod properties;
