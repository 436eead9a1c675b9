import sys,time,torch,itertools; sys.path.insert(0,'src')
t0=time.time(); import kullback; t1=time.time()
from kullback.divergences import DIVERGENCES
from kullback.rows import Problem
from kullback.backends import torch as T, cuda
x=torch.rand(64,1000,device='cuda').softmax(-1);y=torch.rand(64,1000,device='cuda').softmax(-1); torch.cuda.synchronize()
t2=time.time(); l=kullback.kl_div(x,y,'batchmean',form='probs'); torch.cuda.synchronize(); t3=time.time()
print('import',t1-t0,'first use cold',t3-t2, kullback.backend_info())
def mk(form,N,V,dt):
    l=torch.randn(N,V,dtype=torch.float64,device='cuda')*2
    return {'probs':l.softmax(-1),'log_probs':l.log_softmax(-1)}[form].to(dt)
worst={}
for kind in DIVERGENCES:
  for f,g in itertools.product(['probs','log_probs'],repeat=2):
    if kind not in('kl','jensen_shannon','renyi','alpha','reverse_kl') and f!=g: continue
    for dt in [torch.float32,torch.bfloat16,torch.float16,torch.float64]:
      if dt!=torch.float32 and f!=g: continue
      for N,V in [(37,1271),(5,50257),(300,33),(3,1)]:
        if dt in (torch.float64,torch.float16) and V!=1271: continue
        x=mk(f,N,V,dt);y=mk(g,N,V,dt)
        P=Problem(kind,f,g,(1.,1.,*DIVERGENCES[kind].parameters.values()))
        w=torch.rand(N,device='cuda',dtype=torch.float64); w[::3]=0
        for ww in (None,w):
          a=cuda.total(P,x,y,ww,1/N,torch.float32,(True,True))
          b=T.total(P,x.double(),y.double(),ww,1/N,torch.float64,(True,True))
          l1,_=cuda.accumulate(P,x,y,ww,torch.float32);l2,_=T.accumulate(P,x.double(),y.double(),ww,torch.float64)
          c=cuda.gradient(P,x,y,None,torch.rand(N,device='cuda',dtype=torch.float64) if 0 else (w if ww is not None else torch.ones((),device='cuda',dtype=torch.float64).expand(N)),(True,True))
          d=T.gradient(P,x.double(),y.double(),None,w if ww is not None else torch.ones(N,device='cuda',dtype=torch.float64),(True,True))
          for nm,u,v in zip(['tot','gx','gy','rows','bx','by'],[*a,l1,*c],[*b,l2,*d]):
            e=((u.double()-v).norm()/(v.norm()+1e-300)).item()
            key=(kind,f,g,str(dt)[6:],nm); 
            if not e<=worst.get(key,(-1,))[0]: worst[key]=(e,N,V)
bad=[(k,v) for k,v in worst.items() if not v[0]<({'float32':1e-6,'bfloat16':4e-3,'float16':1e-3,'float64':1e-7 if k[4] in('tot','rows') else 1e-13}[k[3]])]
print('checked',len(worst),'bad',len(bad)); 
for b in bad[:40]: print(b)
print('worst fp32', sorted([(v[0],k) for k,v in worst.items() if k[3]=='float32'],reverse=True)[:8])
import timeit
for N,V in [(32,10),(128,1000),(1024,1000)]:
    x=mk('probs',N,V,torch.float32);y=mk('probs',N,V,torch.float32);xr=x.clone().requires_grad_()
    def fwd(): kullback.kl_div(x,y,'batchmean',form='probs')
    def fb(): kullback.kl_div(xr,y,'batchmean',form='probs').backward(); xr.grad=None
    def ef(): torch.nn.functional.kl_div(x.log(),y,reduction='batchmean')
    def efb(): torch.nn.functional.kl_div(xr.log(),y,reduction='batchmean').backward(); xr.grad=None
    r=[]
    for fn in (fwd,ef,fb,efb):
        for _ in range(50): fn()
        torch.cuda.synchronize(); t=time.perf_counter()
        for _ in range(500): fn()
        torch.cuda.synchronize(); r.append((time.perf_counter()-t)/500*1e6)
    print(N,V,'us fwd/eager/fwdbwd/eager',[round(v,1) for v in r])
x=mk('probs',128,1000,torch.float32);y=mk('probs',128,1000,torch.float32);xr=x.clone().requires_grad_()
import cProfile,pstats
def prof(fn,n):
    p=cProfile.Profile();p.enable()
    for _ in range(1000): fn()
    p.disable(); pstats.Stats(p).sort_stats('tottime').print_stats(n)
prof(lambda:kullback.kl_div(x,y,'batchmean',form='probs'),16)
prof(lambda:kullback.kl_div(xr,y,'batchmean',form='probs').backward(),22)
