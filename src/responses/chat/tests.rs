mod answers;
mod calls;
mod dialects;
mod going_on;
mod messages;
mod parameters;
mod properties;
