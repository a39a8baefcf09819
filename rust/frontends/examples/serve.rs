//! A server to a model, for `smg launch --worker-urls`, until Ctrl-C:
//!
//!     cargo run -p pie-frontends --example serve -- .venv/bin/python models/pocket cpu
use std::env;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use pie_engine::{DriverSettings, Service, ServiceSettings};
use pie_frontends::grpc::{Contract, Gateway, GatewaySettings, ServedModel};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let mut next = || arguments.next().ok_or("usage: serve PYTHON MODEL DEVICE");
    let (python, model, device) = (next()?, next()?, next()?);
    let mut driver = DriverSettings::new(python, &model);
    driver.devices = vec![device];
    let mut settings = ServiceSettings::new(driver);
    settings.scheduler.kv_events = true;
    settings.log = Arc::new(|_, line| eprintln!("{line}"));
    let service = Arc::new(Service::start(&settings)?);
    service.wait_ready(Duration::MAX)?;
    let model = ServedModel {
        served_name: model.clone(),
        model_path: model,
        ..ServedModel::default()
    };
    let settings = GatewaySettings::new(Contract::Vllm, model);
    let gateway = Gateway::open(service, settings)?;
    eprintln!("smg launch --worker-urls grpc://{}", gateway.address());
    loop {
        std::thread::park();
    }
}
