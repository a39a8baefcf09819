//! The thread, the socket, the connections.

use std::fmt;
use std::future::Future;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use pie_engine::{Service, TracedRequest};
use tokio::runtime::{self, Runtime};
use tokio::sync::watch;
use tonic::body::Body;
use tonic::codegen::Service as Call;
use tonic::codegen::http::{Request, Response};

use crate::grpc::core::Core;
use crate::grpc::error::GatewayError;
use crate::grpc::settings::{Contract, GatewaySettings};
use crate::grpc::{sglang, vllm};

/// Most bytes of a message: a prompt of a million tokens has some 3 MB.
const MESSAGE_BYTES: usize = 64 << 20;
/// Streams that a client may have reset before they are looked at. Gateways reset many at once, when their clients go.
const PENDING_RESETS: usize = 8192;
/// Bytes that a connection keeps for one stream that its client does not read. Tokens that come after them become one message.
const STREAM_BYTES: usize = 16 << 10;
/// How long clients may take to read that their requests ended with the server.
const FAREWELL: Duration = Duration::from_secs(1);
/// How often a silent connection is asked whether it lives.
const PING_EVERY: Duration = Duration::from_secs(30);

/// A gRPC server: a thread that serves one contract on one port.
///
/// It is the only caller of the service's [`poll_batch`](Service::poll_batch); no one else may fetch outputs. Close it before the
/// service is shut down, so that what still runs learns why it ends. Dropped, it closes at once.
pub struct Gateway {
    address: SocketAddr,
    core: Arc<Core>,
    stop: watch::Sender<Option<Duration>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for Gateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gateway")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl Gateway {
    /// Starts a server for a service whose drivers are ready.
    ///
    /// # Errors
    /// [`GatewayError`].
    pub fn open(service: Arc<Service>, settings: GatewaySettings) -> Result<Self, GatewayError> {
        let (contract, address) = (settings.contract, settings.address);
        let core = Arc::new(Core::new(service, settings)?);
        let failed = |source| GatewayError::Address { address, source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let runtime = runtime::Builder::new_current_thread()
            .enable_all()
            .thread_name("pie-gateway-files")
            .max_blocking_threads(2)
            .build();
        let runtime = runtime.map_err(GatewayError::Thread)?;
        let (stop, stopped) = watch::channel(None);
        let thread = thread::Builder::new().name("pie-gateway".to_owned());
        let shared = Arc::clone(&core);
        let run = move || serve(&runtime, listener, contract, shared, stopped);
        let thread = thread.spawn(run).map_err(GatewayError::Thread)?;
        Ok(Self {
            address,
            core,
            stop,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Requests that have not ended.
    pub fn open_requests(&self) -> usize {
        self.core.open_requests()
    }

    /// Of requests that were traced and have ended since the last call, what happened when; and how many more there were than are
    /// kept. None without [`GatewaySettings::traces`].
    pub fn take_traced(&self) -> (Vec<TracedRequest>, u64) {
        self.core.take_traced()
    }

    /// Takes no more requests, and waits until those that run have ended and their clients have all of it, but no longer than
    /// `limit`. Then every connection is closed. A second call does nothing.
    pub fn close(&self, limit: Duration) {
        self.core.begin_close();
        self.stop.send_replace(Some(limit));
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            // It only fails by a panic.
            let _ = thread.join();
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.close(Duration::ZERO);
    }
}

fn serve(
    runtime: &Runtime,
    listener: TcpListener,
    contract: Contract,
    core: Arc<Core>,
    stop: watch::Receiver<Option<Duration>>,
) {
    runtime.block_on(async {
        let deliverer = Arc::clone(&core);
        let delivery = tokio::spawn(async move { deliverer.deliver().await });
        let shared = Arc::clone(&core);
        match contract {
            Contract::Vllm => {
                accept(listener, vllm::service(shared, MESSAGE_BYTES), core, stop).await;
            }
            Contract::Sglang => {
                accept(listener, sglang::service(shared, MESSAGE_BYTES), core, stop).await;
            }
        }
        delivery.abort();
    });
}

/// Serves connections until the server is closed.
async fn accept<S>(
    listener: TcpListener,
    service: S,
    core: Arc<Core>,
    mut stop: watch::Receiver<Option<Duration>>,
) where
    S: Call<Request<Incoming>, Response = Response<Body>> + Clone + Send + 'static,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    S::Future: Send,
{
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else {
        return;
    };
    let connections = GracefulShutdown::new();
    let mut protocol = http2::Builder::new(TokioExecutor::new());
    protocol
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_EVERY)
        .max_concurrent_streams(None)
        .max_pending_accept_reset_streams(PENDING_RESETS)
        .max_local_error_reset_streams(None)
        .max_send_buf_size(STREAM_BYTES);
    loop {
        let stopped = stop.wait_for(Option::is_some);
        let Some(accepted) = first(listener.accept(), stopped).await else {
            break;
        };
        let Ok((socket, _)) = accepted else {
            // Such as too many open files: others may close some.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        // Without it tokens wait for each other; a connection that refuses it is served all the same.
        let _ = socket.set_nodelay(true);
        let service = service.clone();
        let call = service_fn(move |request| service.clone().call(request));
        let connection = protocol.serve_connection(TokioIo::new(socket), call);
        let connection = connections.watch(connection);
        // A client that goes away is no fault of the server's; its requests end with it.
        tokio::spawn(async move { drop(connection.await) });
    }
    drop(listener);
    let limit = stop.borrow().unwrap_or(Duration::ZERO);
    let mut closing = pin!(connections.shutdown());
    if tokio::time::timeout(limit, &mut closing).await.is_err() {
        core.end_all();
        let _ = tokio::time::timeout(FAREWELL, closing).await;
    }
}

/// What the first future gives, unless the other one ends before.
async fn first<T>(wanted: impl Future<Output = T>, other: impl Future) -> Option<T> {
    tokio::select! {
        biased;
        _ = other => None,
        found = wanted => Some(found),
    }
}
