"""Lists modules that Kaggle's image has, so that a machine without them can export notebooks that import them.

They are what labkit itself needs, and names in kaggle_requirements.txt and the tests of Kaggle/docker-python on GitHub.
The list is not complete, and says nothing of versions.
"""

from __future__ import annotations

OF_LABKIT = """
torch numpy pandas psutil ipywidgets ipykernel IPython plotly pooch rich threadpoolctl pynvml
"""
OF_REQUIREMENTS = """
annoy arrow bayes_opt boto3 boruta cartopy catboost category_encoders comm cytoolz datasets deap easyocr eli5 emoji
fastai fastcore fasttext featuretools fiona gensim geopandas h2o haversine igraph imagehash jedi kaggle
kaggle_environments keras_cv keras_nlp keras_tuner kornia langid lime line_profiler matplotlib mne nbconvert nbdev
nilearn onnx openslide optuna papermill pdf2image pydicom pymongo pypdf pytesseract pytorch_lightning ray s3fs
seaborn segment_anything shap shapely SimpleITK sklearn skopt surprise tensorflow_decision_forests tensorflow_text
tpot torchinfo torchmetrics torchtune transformers xgboost ydata_profiling ydf
"""
OF_TESTS = """
albumentations bokeh cupy cv2 cudf cuml flask flax holoviews hyperopt jax jieba kagglehub keras Levenshtein lightgbm
nltk numba PIL requests scipy skimage spacy statsmodels sympy tensorflow torchaudio torchvision tqdm yaml
"""
MODULES = frozenset(f"{OF_LABKIT} {OF_REQUIREMENTS} {OF_TESTS}".split())
