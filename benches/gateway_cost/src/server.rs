//! The runtime with its service. It says where it listens, and what its threads have taken whenever it is asked.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::io::{self, BufRead, Write};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;

use pie_engine::{DriverSettings, Service, ServiceSettings};
use pie_frontends::grpc::{Contract, Gateway, GatewaySettings, ServedModel};
use serde_json::json;

use crate::ROLE;

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("python");
    let this = std::env::current_exe()?;
    let text = format!(
        "#!/bin/sh\n{ROLE}=driver exec '{}' \"$@\"\n",
        this.display()
    );
    fs::write(&script, text)?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    let mut driver = DriverSettings::new(script, folder.path());
    driver.devices = vec!["cpu".to_owned()];
    driver.spin_budget_us = 0;
    let mut settings = ServiceSettings::new(driver);
    settings.scheduler.kv_events = std::env::var_os("GATEWAY_COST_EVENTS").is_some();
    settings.log = Arc::new(|_, line| eprintln!("{line}"));
    let service = Arc::new(Service::start(&settings)?);
    service.wait_ready(Duration::from_mins(1))?;
    let contract = match std::env::var("GATEWAY_COST_CONTRACT").as_deref() {
        Ok("sglang") => Contract::Sglang,
        _ => Contract::Vllm,
    };
    let settings = GatewaySettings::new(contract, ServedModel::default());
    let gateway = Gateway::open(Arc::clone(&service), settings)?;
    say(&gateway.address().to_string())?;
    for line in io::stdin().lock().lines() {
        if line? == "cpu" {
            say(&json!(threads()?).to_string())?;
        }
    }
    gateway.close(Duration::ZERO);
    service.shutdown();
    Ok(())
}

fn say(line: &str) -> io::Result<()> {
    let mut output = io::stdout().lock();
    writeln!(output, "{line}")?;
    output.flush()
}

/// µs on a processor of each thread so far, by its name.
fn threads() -> Result<BTreeMap<String, f64>, Box<dyn Error>> {
    let mut found = BTreeMap::new();
    for task in fs::read_dir("/proc/self/task")? {
        let task = task?.path();
        let name = fs::read_to_string(task.join("comm"))?.trim().to_owned();
        let times = fs::read_to_string(task.join("schedstat"))?;
        let ns: u64 = times.split(' ').next().unwrap_or("0").parse()?;
        *found.entry(name).or_insert(0.0) += ns as f64 / 1e3;
    }
    Ok(found)
}
