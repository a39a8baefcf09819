//! The graph path over devices that answer at once, late, wrongly or not at all, and on several ranks at once.

mod alone;
mod devices;
mod ranks;
