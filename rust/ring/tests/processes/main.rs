//! Several processes: this program starts itself again in a role, over fork and exec.

mod broadcast;
#[path = "../common/mod.rs"]
mod common;
mod ownership;
mod peers;
mod roles;
mod shutdown;
